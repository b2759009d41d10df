# The server in a container:
#   docker build -t rollcage .
#   docker run --rm -p 8000:8000 -e ROLLCAGE_SERVER_KEY=... -v rollcage:/var/lib/rollcage \
#     --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined rollcage
# Boxes are made of user namespaces, which the usual profiles of container engines forbid: hence the options.
# For podman, and for what else to know, see docs/openenv.md.
FROM python:3.11-slim-bookworm AS built

RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev npm

WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# In a folder of its own: boxes show /usr, and have no business with the server's packages.
RUN python -m venv /opt/rollcage && /opt/rollcage/bin/pip install --no-cache-dir '.[openenv]' ./src/opencode_env

# The agent, for processors with AVX2 and for those without.
RUN /opt/rollcage/bin/python -c "import anyio, pathlib, platform; \
from rollcage.agents.opencode.package import fetch, package_for; \
[anyio.run(fetch, package_for(platform.machine(), flags), pathlib.Path('/opt/agent')) for flags in (['avx2'], [])]"


FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap ca-certificates git ripgrep \
    && rm -rf /var/lib/apt/lists/*

COPY --from=built /opt/rollcage /opt/rollcage
COPY --from=built /opt/agent /opt/agent

RUN useradd --uid 1000 --create-home rollcage && install -d -o rollcage -g rollcage -m 700 /var/lib/rollcage
USER rollcage
WORKDIR /home/rollcage
ENV PATH=/opt/rollcage/bin:$PATH ROLLCAGE_HOME=/var/lib/rollcage
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:8000/health', timeout=4)"]

# No VOLUME: OpenEnv's validator refuses images that declare one.
# Makes the agent ready below ROLLCAGE_HOME, without a network, unless it is; then does what it was asked for.
ENTRYPOINT ["sh", "-c", "mkdir -p $ROLLCAGE_HOME/cache && cp -n /opt/agent/*.tgz $ROLLCAGE_HOME/cache && rollcage setup >&2 && exec \"$@\"", "start"]
# Beyond loopback the server wants a key: ROLLCAGE_SERVER_KEY, or --api-key-file.
CMD ["rollcage", "serve", "--host", "0.0.0.0", "--port", "8000"]
