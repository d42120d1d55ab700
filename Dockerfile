# nanovllm with CUDA: docker build -t nanovllm .
#   docker run --gpus all --ipc=host -p 8000:8000 -v ~/.cache/huggingface:/root/.cache/huggingface nanovllm \
#     Qwen/Qwen3-0.6B --host 0.0.0.0
# ARCHS picks the GPUs that the kernels are compiled for, TORCH the torch they run under.
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS build
ARG TORCH="torch>=2.11"
ARG ARCHS="8.0 8.6 8.9 9.0a 10.0 12.0"
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-dev python3-venv g++ \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/nanovllm
ENV PATH=/opt/nanovllm/bin:$PATH
RUN pip install --no-cache-dir "${TORCH}" numpy "setuptools>=77" ninja wheel
COPY pyproject.toml setup.py README.md LICENSE /src/
COPY csrc /src/csrc
COPY nanovllm /src/nanovllm
WORKDIR /src
RUN NANOVLLM_CUDA=1 TORCH_CUDA_ARCH_LIST="${ARCHS}" pip install --no-cache-dir --no-build-isolation ".[server]"

FROM nvidia/cuda:${CUDA}-base-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends python3 curl && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/nanovllm /opt/nanovllm
ENV PATH=/opt/nanovllm/bin:$PATH PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m CMD curl -fs http://127.0.0.1:8000/health || exit 1
STOPSIGNAL SIGTERM
ENTRYPOINT ["nanovllm", "serve"]
