# Programs of others that tests run: clients, tools of HTTP/2 and gRPC, Helm and Kubernetes.

readonly PERF_ANALYZER_ENV=build/python-perf-analyzer  # tests/conformance/CMakeLists.txt expects it here
readonly KSERVE_ENV=build/python-kserve                # likewise
readonly GRPCURL_VERSION=v1.9.1  # these three: the newest that Debian's Go 1.19 builds
readonly GHZ_VERSION=v0.120.0
readonly HELM_VERSION=v3.11.3
readonly KUBERNETES_VERSION=v1.34.4  # that of tests/cluster/kubernetes/go.mod
readonly H2SPEC_VERSION=v0.0.0-20200804131034-70ac22940108  # v2.6.0
readonly PROTOC_GEN_GO_VERSION=v1.33.0  # those of tests/conformance/clients/go/go.mod
readonly PROTOC_GEN_GO_GRPC_VERSION=v1.3.0
readonly PROTOC_GEN_GRPC_JAVA=io.grpc:protoc-gen-grpc-java:1.76.0:exe:linux-x86_64  # as tests/conformance/clients/java/pom.xml

# Downloads grpc-go the first time.
need_go_client() {
  local program=$PWD/build/tools/go-client
  need_packages
  (cd tests/conformance/clients/go && go build -buildvcs=false -o "$program" .)
  need_go_tool protoc-gen-go google.golang.org/protobuf/cmd/protoc-gen-go "$PROTOC_GEN_GO_VERSION"
  need_go_tool protoc-gen-go-grpc google.golang.org/grpc/cmd/protoc-gen-go-grpc "$PROTOC_GEN_GO_GRPC_VERSION"
  local directory=$PWD/build/tools/go-first-call
  mkdir -p "$directory"
  cp tests/conformance/clients/go/{go.mod,go.sum,first_call/main.go} "$directory"
  PATH=$PWD/build/tools:$PATH protoc -I proto --go_out="$directory" --go_opt=paths=source_relative \
    --go-grpc_out="$directory" --go-grpc_opt=paths=source_relative rapt/v1/attention.proto
  (cd "$directory" && go build -buildvcs=false -o first-call .)
}

need_node_client() {
  local directory=build/tools/node-client
  need_commands npm:npm
  mkdir -p "$directory"
  cp tests/conformance/clients/node/package*.json "$directory"
  (cd "$directory" && npm ci --ignore-scripts --no-audit --no-fund --silent)
}

need_java_client() {
  local sources=tests/conformance/clients/java directory=$PWD/build/tools/java-client
  need_commands javac:default-jdk-headless mvn:maven
  mvn --quiet --batch-mode -f "$sources/pom.xml" -DoutputDirectory="$directory" \
    org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies
  mvn --quiet --batch-mode -f "$sources/pom.xml" -Dartifact="$PROTOC_GEN_GRPC_JAVA" -DoutputDirectory="$directory" \
    -Dmdep.stripVersion=true org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy
  chmod +x "$directory/protoc-gen-grpc-java-linux-x86_64.exe"
  protoc -I proto --plugin=protoc-gen-grpc-java="$directory/protoc-gen-grpc-java-linux-x86_64.exe" \
    --java_out="$directory" --grpc-java_out=@generated=omit:"$directory" rapt/v1/attention.proto
  javac -cp "$directory/*" -sourcepath "$directory" -d "$directory" "$sources"/*.java
}

# Third-party clients for the conformance tests.
need_conformance_tools() {
  need_python "$PYTHON_ENV" tests/conformance/requirements.txt
  need_python "$PERF_ANALYZER_ENV" tests/conformance/requirements-perf-analyzer.txt
  need_python "$KSERVE_ENV" tests/conformance/requirements-kserve.txt
  need_commands chromium-headless-shell:chromium-headless-shell
  need_go_tool grpcurl github.com/fullstorydev/grpcurl/cmd/grpcurl "$GRPCURL_VERSION"
  need_go_tool ghz github.com/bojand/ghz/cmd/ghz "$GHZ_VERSION"
  need_go_tool h2spec github.com/summerwind/h2spec/cmd/h2spec "$H2SPEC_VERSION"
  need_go_client
}

# Builds Kubernetes and CoreDNS, each as one program.
need_kubernetes() {
  local sources=$PWD/tests/cluster tools=$PWD/build/tools/kubernetes name stamp
  stamp=$tools/.made-from-$(cat "$sources"/{kubernetes,coredns}/{main.go,go.mod} | sha256sum | cut -c1-16)
  [ ! -e "$stamp" ] || return 0
  need_packages
  need_go 24
  say "building Kubernetes and CoreDNS; this takes a quarter of an hour"
  rm -rf "$tools"
  mkdir -p "$tools"
  (
    export GOMODCACHE=$tools/cache/modules GOCACHE=$tools/cache/build GOTOOLCHAIN=local
    export GOFLAGS="-trimpath -buildvcs=false -modcacherw"
    version=k8s.io/component-base/version
    cd "$sources/kubernetes"
    nice go build -o "$tools" -ldflags "-s -w -X $version.gitVersion=$KUBERNETES_VERSION \
      -X $version.gitMajor=1 -X $version.gitMinor=$(cut -d. -f2 <<<"$KUBERNETES_VERSION")" .
    cd "$sources/coredns"
    nice go build -o "$tools" -ldflags "-s -w" .
  )
  rm -rf "$tools/cache"
  for name in etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl; do
    ln -s kubernetes "$tools/$name"
  done
  touch "$stamp"
}

# need_go MINOR: Debian's Go is 1.19.
need_go() {
  local version
  version=$(GOTOOLCHAIN=local go env GOVERSION)
  [[ $version =~ ^go1\.([0-9]+) ]] && [ "${BASH_REMATCH[1]}" -ge "$1" ] ||
    die "this needs Go 1.$1 or newer in PATH; $(command -v go) is $version"
}

need_helm() { need_go_tool helm helm.sh/helm/v3/cmd/helm "$HELM_VERSION"; }
