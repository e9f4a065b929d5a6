# `anomaly serve` for exported models, without torch. From the repository:
#
#   docker build -f docker/serve.Dockerfile -t anomaly-serve .
#   docker run -d -p 127.0.0.1:8000:8000 -e ANOMALY_TOKEN -v "$PWD/models:/models:ro" -v record:/record anomaly-serve
#
# docker/compose.yaml puts nginx in front, for other machines. /models has a folder for each model, as `anomaly export` has written it; /record keeps the answers.
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE constraints.txt ./
COPY anomaly anomaly
COPY configs configs
RUN python -m venv /opt/anomaly \
    && /opt/anomaly/bin/pip install --no-cache-dir -c constraints.txt '.[serve,mqtt,onnx]'

FROM python:3.12-slim
RUN useradd --system --uid 10001 --no-create-home anomaly \
    && install -d -o anomaly /models /record
COPY --from=build /opt/anomaly /opt/anomaly
ENV PATH=/opt/anomaly/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001
VOLUME ["/models", "/record"]
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=4)"]
ENTRYPOINT ["anomaly", "serve", "--models", "/models", "--record", "/record/line.sqlite", "--host", "0.0.0.0"]
