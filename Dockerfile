# rapt-server in a container.
#
#     docker build --tag rapt .
#     docker run --read-only -p 127.0.0.1:8000-8002:8000-8002 rapt --insecure
#
# In the container the server listens on all addresses. --insecure permits plain text; for TLS with mounted files see
# docs/security.md.
FROM debian:bookworm-slim AS build
ENV DEBIAN_FRONTEND=noninteractive
WORKDIR /rapt
# Packages change rarely: install them in a layer before the sources.
COPY deploy/debian-packages.txt deploy/
RUN apt-get update -qq && \
    sed -n '/^# Build/,/^# Test/p' deploy/debian-packages.txt | grep -v '^#' | \
      xargs apt-get install -y -qq --no-install-recommends && \
    rm -rf /var/lib/apt/lists/*
COPY CMakeLists.txt CMakePresets.json LICENSE ./
COPY proto proto
COPY base base
COPY call call
COPY attention attention
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
# An unnamed user: the server needs no home directory, no shell and no writable file.
USER 65532:65532
# Other containers reach ports published on the host by that name; those of a network by names that RAPT_HTTP_HOSTS lists.
ENV RAPT_HTTP_ADDRESS=0.0.0.0:8000 RAPT_GRPC_ADDRESS=0.0.0.0:8001 RAPT_METRICS_ADDRESS=0.0.0.0:8002 \
    RAPT_HTTP_HOSTS=host.docker.internal
EXPOSE 8000 8001 8002
# The server is process 1: on SIGTERM it drains and exits with 0.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s CMD ["rapt", "health"]
ENTRYPOINT ["rapt-server"]

FROM build AS build-cudnn
RUN apt-get update -qq && \
    apt-get install -y -qq --no-install-recommends python3-venv && \
    rm -rf /var/lib/apt/lists/*
COPY deploy/cudnn-requirements.txt deploy/
# The same place as `./dev build --cudnn`; without cuDNN's precompiled kernels, which attention does not use.
RUN python3 -m venv build/cudnn && \
    build/cudnn/bin/pip install --quiet --no-cache-dir --no-deps -r deploy/cudnn-requirements.txt && \
    rm build/cudnn/lib/python3*/site-packages/nvidia/cudnn/lib/libcudnn_engines_precompiled.so.9
RUN cmake --preset release -DRAPT_BUILD_TESTS=OFF -DRAPT_CUDNN=ON && \
    cmake --build build/release --target rapt-server --parallel "$(nproc)" && \
    cmake --install build/release --component server --prefix /server --strip && \
    mkdir /nvidia /nvidia/licences && cd build/cudnn/lib/python3*/site-packages && \
    cp nvidia/cudnn/lib/*.so* nvidia/cu13/lib/libcudart.so* nvidia/cu13/lib/libnvrtc*.so* /nvidia/ && \
    for licence in $(find nvidia_*.dist-info -iname 'licen*.txt'); do \
      cp "$licence" "/nvidia/licences/${licence%%.dist-info*}.txt"; done

# The licences of cuDNN and CUDA are in the image, next to their libraries. They restrict redistribution.
FROM cpu AS cudnn
COPY --from=build-cudnn /server/bin/rapt-server /usr/bin/
COPY --from=build-cudnn /nvidia /usr/lib/rapt/nvidia
ENV RAPT_CUDNN_LIBRARIES=/usr/lib/rapt/nvidia \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The default target of `docker build`.
FROM cpu
