FROM python:3.12-slim

# Without a GPU, an index that has torch's CPU wheels makes a much smaller image:
# docker build --build-arg PIP_EXTRA_INDEX_URL=… -t warpline .
ARG PIP_EXTRA_INDEX_URL

WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src ./src
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[serve,hub]' && useradd --create-home --uid 10001 warpline

USER 10001
WORKDIR /home/warpline
ENV PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=60s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["warpline", "serve", "--host", "0.0.0.0"]
