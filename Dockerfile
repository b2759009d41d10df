# The server in a container:
#   docker build -t rollcage .
#   docker run --rm -p 8000:8000 -e ROLLCAGE_SERVER_KEY=... --security-opt seccomp=unconfined \
#     --security-opt apparmor=unconfined --security-opt systempaths=unconfined -v rollcage:/var/lib/rollcage rollcage
# Boxes are made of user namespaces, which the usual profiles of container engines forbid: hence the options.
FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap ripgrep git npm curl ca-certificates \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
COPY pyproject.toml README.md ./
COPY src ./src
RUN pip install --no-cache-dir '.[server]'

ENV ROLLCAGE_HOME=/var/lib/rollcage
VOLUME /var/lib/rollcage
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=3s --start-period=120s --retries=3 \
    CMD curl -fsS http://127.0.0.1:8000/health || exit 1

# The first start fetches the agent into the volume. Beyond loopback the server wants a key: ROLLCAGE_SERVER_KEY.
CMD ["sh", "-c", "rollcage setup && exec rollcage serve --host 0.0.0.0 --port 8000"]
