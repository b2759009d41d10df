"""What lies beside a plain verifier in its box."""
