# vLLM with degarble's proof in front: docs/container.md. Build: docker build -t degarble-vllm:0.1.0 .
# By digest instead of by tag: --build-arg BASE=vllm/vllm-openai@sha256:...
ARG BASE=vllm/vllm-openai:v0.33.0

FROM ${BASE} AS build
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY .types .types
COPY harness harness
COPY references references
COPY kernels kernels
COPY reports reports
COPY suites suites
# The wheel alone: what it needs is pinned below, and torch is the image's own.
RUN PIP_CONSTRAINT=constraints.txt python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE} AS serve
COPY constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /wheels
# Exact versions from constraints.txt; nothing that vLLM brings is replaced.
RUN grep -E '^(numba|llvmlite|sqlalchemy|SQLAlchemy|matplotlib|contourpy|cycler|fonttools|kiwisolver|pyparsing|pandas|python-dateutil|hypothesis|sortedcontainers|pytest|iniconfig|pluggy)==' \
        /tmp/constraints.txt > /tmp/needed.txt \
    && python3 -m pip install --no-cache-dir --no-deps --requirement /tmp/needed.txt /wheels/*.whl \
    && rm -rf /wheels /tmp/constraints.txt /tmp/needed.txt \
    && python3 -c 'import degarble.harness.serve.proven'
RUN groupadd --gid 10001 degarble && useradd --uid 10001 --gid 10001 --create-home degarble
ENV HF_HUB_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1 \
    PYTHONUNBUFFERED=1
WORKDIR /home/degarble
USER 10001:10001
EXPOSE 8000 8001
# Ready only behind audit, known answers, kernels and coherence; an 881 GB checkpoint is read first.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8001/health', timeout=4)"]
ENTRYPOINT ["python3", "-m", "degarble.harness.serve.proven"]
