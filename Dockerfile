# vLLM 0.32.0 with vllm_tide in it: patched, checked, without root.
#
#   scripts/wheel.sh dist
#   docker build --target serve -t tide-serve .
#   docker build --target train -t tide-train .
#
# BASE_IMAGE is any image that carries vLLM 0.32.0 (or 0.33.0, see README); vLLM's release scripts publish
#   docker.io/vllm/vllm-openai:v0.32.0        CUDA (the default)
#   docker.io/vllm/vllm-openai-rocm:v0.32.0   ROCm, gfx942 (MI300X) among others
#   docker.io/vllm/vllm-openai-cpu:v0.32.0    CPU, what this version of vllm_tide runs on
# The build stops if a file to be patched is not that release's, byte for byte.
#
# Engine and trainer meet in /dev/shm and in TIDE_RUN_DIR, and tell by its pid
# whether the other lives. So the two containers share the IPC and pid namespaces, a
# volume at /run/tide and the user: see scripts/deploy.
ARG BASE_IMAGE=docker.io/vllm/vllm-openai:v0.32.0

FROM ${BASE_IMAGE} AS base
ARG BASE_IMAGE
ARG REVISION=""
ARG TIDE_UID=2000
# Intel OpenMP, which vLLM's CPU kernels are tuned for: its path in a CPU base that does
# not preload it. vLLM's own CPU image does, and a base's LD_PRELOAD is kept.
ARG PRELOAD=""
LABEL org.opencontainers.image.title="vllm_tide" \
    org.opencontainers.image.description="vLLM whose draft learns from live traffic" \
    org.opencontainers.image.version="0.2.0" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.base.name="${BASE_IMAGE}"
USER 0
# The wheel of scripts/wheel.sh for this image's architecture.
RUN --mount=type=bind,source=dist,target=/wheels \
    python3 -m pip install --no-deps --no-cache-dir --no-index --find-links=/wheels vllm-tide==0.2.0 \
    && vllm-tide patch apply \
    && vllm-tide patch check \
    && vllm-tide patch status
# vLLM's own user; another base may have none. Whoever is of group 0 may run it too
# (OpenShift's arbitrary users): models, profiles and compiled code are kept below HOME.
RUN { getent passwd "${TIDE_UID}" > /dev/null \
    || useradd --no-create-home --home-dir /home/vllm --gid 0 --uid "${TIDE_UID}" vllm; } \
    && install -d -o "${TIDE_UID}" -g 0 -m 0770 \
    /run/tide /var/lib/tide /home/vllm /home/vllm/.cache \
    && chown -R "${TIDE_UID}:0" /home/vllm && chmod -R g=u /home/vllm
# A folder below the volume: the root of a fresh volume may belong to root.
# USER: a user without a name has no other for PyTorch's caches.
ENV TIDE_RUN_DIR=/run/tide/run \
    HOME=/home/vllm \
    USER=vllm \
    LD_PRELOAD=${LD_PRELOAD:-$PRELOAD} \
    VLLM_NO_USAGE_STATS=1 \
    DO_NOT_TRACK=1
# A number, so that Kubernetes' runAsNonRoot can tell that it is not root.
USER ${TIDE_UID}:0
WORKDIR /home/vllm

FROM base AS train
# Healthy while it answers, and while there is no engine to train for.
HEALTHCHECK --interval=30s --timeout=60s --start-period=2m --retries=5 \
    CMD ["vllm-tide", "status", "--probe", "--timeout", "45"]
ENTRYPOINT ["vllm-tide", "train", "--wait"]

FROM base AS serve
EXPOSE 8000
# Loading a large model takes long. With another --port set PORT too.
HEALTHCHECK --interval=10s --timeout=10s --start-period=30m --retries=6 \
    CMD ["python3", "-c", "import http.client as h, os; c = h.HTTPConnection('127.0.0.1', int(os.environ.get('PORT', 8000)), timeout=8); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["vllm", "serve"]
