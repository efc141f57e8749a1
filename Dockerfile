# A vLLM 0.32.0 image with vllm_tide in it.
#
#   docker build --target serve -t tide-serve .
#   docker build --target train -t tide-train .
#
# BASE_IMAGE is any image that carries vLLM 0.32.0 (CUDA or CPU). Both targets run as an
# unprivileged user; the engine and the trainer meet in POSIX shared memory and in
# VLLM_TIDE_RUN_DIR, so give the two containers one IPC namespace, one volume there, and
# the same user:
#
#   docker run --name serve --ipc shareable -v tide:/run/tide tide-serve MODEL ...
#   docker run --ipc container:serve --pid container:serve -v tide:/run/tide tide-train
ARG BASE_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${BASE_IMAGE} AS build
USER root
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY csrc csrc
COPY patches patches
COPY vllm_tide vllm_tide
RUN python3 -m pip wheel --no-deps --no-cache-dir --wheel-dir /wheels .

FROM ${BASE_IMAGE} AS base
USER root
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip install --no-deps --no-cache-dir /wheels/*.whl \
    && vllm-tide patch apply \
    && vllm-tide patch status \
    && (id tide > /dev/null 2>&1 || useradd --create-home --uid 10001 tide) \
    && install -d -o tide -m 0700 /run/tide
ENV VLLM_TIDE_RUN_DIR=/run/tide \
    VLLM_NO_USAGE_STATS=1
USER tide
WORKDIR /home/tide

FROM base AS train
ENTRYPOINT ["vllm-tide", "train", "--wait"]

FROM base AS serve
EXPOSE 8000
ENTRYPOINT ["vllm", "serve"]
