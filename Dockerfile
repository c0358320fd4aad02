# A node of an emulated cluster: Orchestra, with ip and tc to shape its link.
#
#   docker build -t neural-orchestra .
#   docker run --privileged neural-orchestra orchestra emulation check examples/clusters/mixed.yaml
#
# With an index of wheels for processors alone the image is several GB smaller:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=... -t neural-orchestra .
FROM python:3.11-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends iproute2 \
    && rm -rf /var/lib/apt/lists/*

ARG PIP_EXTRA_INDEX_URL
WORKDIR /orchestra
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY examples examples
RUN pip install --no-cache-dir -c constraints.txt torch==2.13.0 .
