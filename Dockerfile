# rapt-server in a container.
#
#     docker build --tag rapt .
#     docker run --read-only -p 127.0.0.1:8001:8001 -p 127.0.0.1:8002:8002 rapt --insecure
#
# Inside, the server listens on every address, and in plain text only because --insecure says so;
# docs/security.md tells of TLS, by mounted files.
FROM debian:bookworm-slim AS build
ENV DEBIAN_FRONTEND=noninteractive
WORKDIR /rapt
# The packages change rarely and so stand in a layer before the sources.
COPY deploy/debian-packages.txt deploy/
RUN apt-get update -qq && \
    sed -n '/^# Build/,/^# Test/p' deploy/debian-packages.txt | grep -v '^#' | \
      xargs apt-get install -y -qq --no-install-recommends && \
    rm -rf /var/lib/apt/lists/*
COPY CMakeLists.txt CMakePresets.json LICENSE ./
COPY proto proto
COPY server server
COPY client client
COPY deploy/packaging deploy/packaging
RUN cmake --preset release -DRAPT_BUILD_TESTS=OFF && \
    cmake --build build/release --target rapt-server rapt rapt-load --parallel "$(nproc)" && \
    cd build/release && cpack && mv rapt-server_*.deb /rapt-server.deb

FROM debian:bookworm-slim AS cpu
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="rapt" \
      org.opencontainers.image.description="attention as a service" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
COPY --from=build /rapt-server.deb /tmp/
RUN apt-get update -qq && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends /tmp/rapt-server.deb && \
    rm -rf /tmp/* /var/lib/apt/lists/* /var/cache/* /var/log/*
# Nobody of this number exists in the image: the server needs no home, no shell and no file to write.
USER 65532:65532
ENV RAPT_GRPC_ADDRESS=0.0.0.0:8001 RAPT_METRICS_ADDRESS=0.0.0.0:8002
EXPOSE 8001 8002
# The server is process 1: it takes SIGTERM, drains and leaves with 0.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s CMD ["rapt", "health"]
ENTRYPOINT ["rapt-server"]
