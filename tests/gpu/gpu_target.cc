// Adds the GPU of this machine to TargetBackends(), so that every test that runs on all targets
// runs on it. Exits with 1 if there is no GPU.
//
//   RAPT_CUDNN_LIBRARIES     as --cudnn_libraries
//   RAPT_DEVICE_PROPERTIES   a file to which cuDNN's description of the GPU is written
//   RAPT_DESCRIBED_DEVICE    such a file: kernels are compiled for the described device
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "attention/cpu/cpu_backend.h"
#include "attention/cudnn/cuda_device.h"
#include "attention/cudnn/cudnn_backend.h"
#include "attention/cudnn/library.h"
#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

using cudnn::CompiledPlan;
using cudnn::Device;
using cudnn::Library;

// The GPU, with kernels compiled for a described device.
class DescribedDevice final : public Device {
 public:
  DescribedDevice(std::unique_ptr<Device> device, const Library& library, std::string properties)
      : device_(std::move(device)), library_(library), properties_(std::move(properties)) {}

  std::string kind() const override { return device_->kind(); }
  int lanes() const override { return device_->lanes(); }
  cudnn::Lane& lane(int n) override { return device_->lane(n); }
  int64_t arena_bytes() const override { return device_->arena_bytes(); }
  int64_t page_memory_bytes() const override { return device_->page_memory_bytes(); }
  absl::StatusOr<CompiledPlan> Compile(const cudnn::SdpaGraph& graph) override {
    return library_.Compile(graph, properties_);
  }
  absl::Status Restart() override { return device_->Restart(); }
  absl::StatusOr<std::shared_ptr<const DeviceMemory>> OpenShared(absl::string_view handle,
                                                                 int64_t device,
                                                                 int64_t bytes) override {
    return device_->OpenShared(handle, device, bytes);
  }

 private:
  const std::unique_ptr<Device> device_;
  const Library& library_;
  const std::string properties_;
};

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::StatusOr<std::unique_ptr<Device>> Open() {
  const std::string libraries = Variable("RAPT_CUDNN_LIBRARIES");
  absl::StatusOr<std::unique_ptr<Device>> device =
      cudnn::OpenCudaDevice({.libraries = libraries,
                             .memory_bytes = int64_t{1} << 30,
                             .page_memory_bytes = int64_t{1} << 28});
  if (!device.ok()) return device;
  const absl::StatusOr<const Library*> library = Library::Load(libraries);
  if (!library.ok()) return library.status();
  if (const std::string file = Variable("RAPT_DEVICE_PROPERTIES"); !file.empty()) {
    const absl::StatusOr<std::string> properties = (*library)->Describe(0);
    if (!properties.ok()) return properties.status();
    std::ofstream(file) << *properties << '\n';
  }
  if (const std::string file = Variable("RAPT_DESCRIBED_DEVICE"); !file.empty()) {
    std::ifstream text(file);
    std::string properties(std::istreambuf_iterator<char>(text), {});
    return std::make_unique<DescribedDevice>(*std::move(device), **library, std::move(properties));
  }
  return device;
}

}  // namespace

const BackendSet& TargetBackends() {
  static const BackendSet& backends = *[] {
    static const SteadyClock clock;
    auto* device = new cudnn::CudnnBackend;  // never destroyed, like the set
    device->Start(Open(), CpuBackend(), clock, {});
    if (const absl::Status status = device->Available(); !status.ok()) {
      std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
      std::exit(1);
    }
    return new BackendSet({device});
  }();
  return backends;
}

}  // namespace rapt::test
