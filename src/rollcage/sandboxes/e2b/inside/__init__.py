"""The program that starts commands in a box of E2B."""
