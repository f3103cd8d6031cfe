# syntax=docker/dockerfile:1
# Rung in a container, for CPUs and for NVIDIA GPUs:
#
#   docker build --target cpu  -t rung:cpu .
#   docker build --target cuda -t rung:cuda .
#
# torch brings the libraries of CUDA along; of the machine, a container needs the driver alone.
ARG BASE=debian:12.15-slim
ARG TORCH=2.13.0

FROM ${BASE} AS python
ENV DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# Versions are those of the pinned base's release; g++ and the headers are for --compile.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev g++ \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/rung \
    && groupadd --gid 1000 rung \
    && useradd --uid 1000 --gid rung --create-home rung \
    && install -d -o rung -g rung /runs /workspace
ENV PATH=/opt/rung/bin:$PATH PYTHONUNBUFFERED=1

# Rung itself is built where its sources may lie about.
FROM python AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-deps --wheel-dir /wheels .

# torch has a layer of its own: it is large, and stays when Rung changes.
FROM python AS torch-cpu
ARG TORCH
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --index-url "${TORCH_INDEX}" "torch==${TORCH}"

FROM python AS torch-cuda
ARG TORCH
RUN pip install "torch==${TORCH}"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM torch-cpu AS cpu
ARG TORCH
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install "torch==${TORCH}" "$(echo /wheels/rung-*.whl)[examples]"
LABEL org.opencontainers.image.title="Rung" \
      org.opencontainers.image.description="One plain PyTorch task, every way of spreading it: on CPUs" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 1000:1000
WORKDIR /workspace
ENTRYPOINT ["rung"]
CMD ["--help"]

FROM torch-cuda AS cuda
ARG TORCH
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install "torch==${TORCH}" "$(echo /wheels/rung-*.whl)[examples]"
LABEL org.opencontainers.image.title="Rung" \
      org.opencontainers.image.description="One plain PyTorch task, every way of spreading it: on NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 1000:1000
WORKDIR /workspace
ENTRYPOINT ["rung"]
CMD ["--help"]
