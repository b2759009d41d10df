"""Rollouts as OpenTelemetry traces, sent to an OTLP collector. It imports the extra `[otel]`: fetch it when used."""
