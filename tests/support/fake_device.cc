#include "tests/support/fake_device.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/half.h"

namespace rapt::test {
namespace {

using cudnn::ArenaLayout;
using cudnn::CompiledPlan;
using cudnn::kTileKeys;
using cudnn::SdpaGraph;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// Computes the graph's attention over packed tensors in `arena`, or keys and values in `pages`.
class Kernel {
 public:
  Kernel(const SdpaGraph& graph, const ArenaLayout& layout, std::byte* arena,
         const std::byte* pages)
      : g_(graph), layout_(layout), arena_(arena), pages_(pages) {}

  void Run() {
    if (g_.backward) return RunBackward();
    for (int64_t b = 0; b < g_.batch; ++b) {
      for (int64_t h = 0; h < g_.query_heads; ++h) {
        for (int64_t i = 0; i < g_.query_length; ++i) {
          const bool absent = g_.ragged && i >= LengthAt(layout_.query_lengths, b, 0);
          if (absent) {
            StoreLse(b, h, i, kNaN);
          } else {
            RunRow(b, h, i);
          }
        }
      }
    }
  }

 private:
  double Load(int64_t place, int64_t index) const {
    return LoadElement(arena_ + place, g_.dtype, index);
  }

  template <typename T>
  T IntegerAt(int64_t place, int64_t index) const {
    T integer;
    std::memcpy(&integer, arena_ + place + index * sizeof(integer), sizeof(integer));
    return integer;
  }

  int64_t LengthAt(int64_t place, int64_t b, int64_t whole) const {
    return g_.has_lengths ? IntegerAt<int32_t>(place, b) : whole;
  }

  // The first element of row i of a head.
  int64_t QueryRow(int64_t offsets, int64_t b, int64_t h, int64_t i, int64_t size) const {
    if (g_.ragged) return IntegerAt<int64_t>(offsets, b) + (i * g_.query_heads + h) * size;
    return ((b * g_.query_heads + h) * g_.query_length + i) * size;
  }

  int64_t KeyRow(int64_t offsets, int64_t b, int64_t h, int64_t j, int64_t size) const {
    h /= g_.query_heads / g_.kv_heads;
    if (g_.ragged) return IntegerAt<int64_t>(offsets, b) + (j * g_.kv_heads + h) * size;
    return ((b * g_.kv_heads + h) * g_.key_length + j) * size;
  }

  // Element d of key j, or of its value.
  double KeyAt(int64_t b, int64_t h, int64_t j, int64_t d) const {
    if (g_.pages) return PagedAt(b, h, j, d, 0, g_.head_size);
    return Load(layout_.key, KeyRow(layout_.key_offsets, b, h, j, g_.head_size) + d);
  }
  double ValueAt(int64_t b, int64_t h, int64_t j, int64_t d) const {
    if (g_.pages) return PagedAt(b, h, j, d, cudnn::PageKeyBytes(g_), g_.value_head_size);
    return Load(layout_.value, KeyRow(layout_.value_offsets, b, h, j, g_.value_head_size) + d);
  }
  double PagedAt(int64_t b, int64_t h, int64_t j, int64_t d, int64_t part, int64_t size) const {
    const int64_t rows = g_.pages->rows;
    const int64_t page =
        IntegerAt<int32_t>(layout_.page_table, b * (g_.key_length / rows) + j / rows);
    if (page < 0 || page >= g_.pages->count) return kNaN;
    const int64_t row = h / (g_.query_heads / g_.kv_heads) * rows + j % rows;
    return LoadElement(pages_ + page * cudnn::PageBytes(g_) + part, g_.dtype, row * size + d);
  }

  // Whole tiles are read from ragged tensors and pages.
  int64_t KeysRead(int64_t b) const {
    if (!g_.ragged && !g_.pages) return g_.key_length;
    const int64_t keys = LengthAt(layout_.key_lengths, b, 0);
    return (keys + kTileKeys - 1) / kTileKeys * kTileKeys;
  }

  double BiasAt(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (!g_.bias) return 0;
    const auto& d = g_.bias->dims;
    const int64_t row =
        ((d[0] == 1 ? 0 : b) * d[1] + (d[1] == 1 ? 0 : h)) * d[2] + (d[2] == 1 ? 0 : i);
    return LoadElement(arena_ + layout_.bias, g_.bias->dtype, row * d[3] + j);
  }

  bool Sees(int64_t b, int64_t i, int64_t j) const {
    const int64_t queries = LengthAt(layout_.query_lengths, b, g_.query_length);
    const int64_t keys = LengthAt(layout_.key_lengths, b, g_.key_length);
    const int64_t diagonal = i + (g_.bottom_right ? keys - queries : 0);
    if (i >= queries || j >= keys) return false;
    if (g_.left_bound && j <= diagonal - *g_.left_bound) return false;
    return !g_.right_bound || j <= diagonal + *g_.right_bound;
  }

  double ScoreAt(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t q = QueryRow(layout_.query_offsets, b, h, i, g_.head_size);
    double score = 0;
    for (int64_t d = 0; d < g_.head_size; ++d) {
      score += Load(layout_.query, q + d) * KeyAt(b, h, j, d);
    }
    score *= g_.scale;
    if (g_.softcap > 0) score = g_.softcap * std::tanh(score / g_.softcap);
    return score + BiasAt(b, h, i, j);
  }

  void StoreLse(int64_t b, int64_t h, int64_t i, double lse) {
    const int64_t row = (b * g_.query_heads + h) * g_.query_length + i;
    StoreElement(arena_ + layout_.lse, DType::kFloat32, row, lse);
  }

  // As on the device, a row that sees no key is 0 / 0, and hidden values are multiplied by weights
  // of 0.
  void RunRow(int64_t b, int64_t h, int64_t i) {
    std::vector<double> weights(KeysRead(b), kMinusInfinity);
    for (int64_t j = 0; j < g_.key_length; ++j) {
      if (Sees(b, i, j)) weights.at(j) = ScoreAt(b, h, i, j);
    }
    const double max = *std::max_element(weights.begin(), weights.end());
    double sum = 0;
    for (double& weight : weights) sum += weight = std::exp(weight - max);
    const int64_t size = g_.value_head_size;
    const int64_t row = QueryRow(layout_.output_offsets, b, h, i, size);
    for (int64_t d = 0; d < size; ++d) {
      double output = 0;
      for (size_t j = 0; j < weights.size(); ++j) {
        output += weights[j] / sum * ValueAt(b, h, static_cast<int64_t>(j), d);
      }
      StoreElement(arena_ + layout_.output, g_.dtype, row + d,
                   max == kMinusInfinity ? kNaN : output);
    }
    StoreLse(b, h, i, max == kMinusInfinity ? kNaN : max + std::log(sum));
  }

  // As on the device, hidden rows are multiplied by weights of 0, or of NaN at an lse of -inf, and
  // the gradients of queries beyond a length are undefined.
  void RunBackward() {
    const int64_t group = g_.query_heads / g_.kv_heads;
    for (int64_t b = 0; b < g_.batch; ++b) {
      for (int64_t kv_head = 0; kv_head < g_.kv_heads; ++kv_head) {
        std::vector<double> dk(g_.key_length * g_.head_size);
        std::vector<double> dv(g_.key_length * g_.value_head_size);
        for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
          for (int64_t i = 0; i < g_.query_length; ++i) AddRow(b, h, i, dk, dv);
        }
        const int64_t first = (b * g_.kv_heads + kv_head) * g_.key_length;
        StoreAll(layout_.key_gradient, first * g_.head_size, dk);
        StoreAll(layout_.value_gradient, first * g_.value_head_size, dv);
      }
    }
  }

  void AddRow(int64_t b, int64_t h, int64_t i, std::vector<double>& dk, std::vector<double>& dv) {
    const int64_t row = (b * g_.query_heads + h) * g_.query_length + i;
    const int64_t size = g_.head_size;
    const int64_t value_size = g_.value_head_size;
    const auto gradient = [&](int64_t d) {
      return Load(layout_.output_gradient, row * value_size + d);
    };
    const double lse = LoadElement(arena_ + layout_.lse, DType::kFloat32, row);
    double sum = 0;
    for (int64_t d = 0; d < value_size; ++d) {
      sum += gradient(d) * Load(layout_.output, row * value_size + d);
    }
    std::vector<double> dq(size);
    for (int64_t j = 0; j < g_.key_length; ++j) {
      const double score = Sees(b, i, j) ? ScoreAt(b, h, i, j) : kMinusInfinity;
      const double weight = std::exp(score - lse);
      const int64_t value = KeyRow(0, b, h, j, value_size);
      double dp = 0;
      for (int64_t d = 0; d < value_size; ++d) {
        dp += gradient(d) * Load(layout_.value, value + d);
        dv[j * value_size + d] += weight * gradient(d);
      }
      const double ds = weight * (dp - sum) * g_.scale;
      for (int64_t d = 0; d < size; ++d) {
        dq[d] += ds * Load(layout_.key, KeyRow(0, b, h, j, size) + d);
        dk[j * size + d] += ds * Load(layout_.query, row * size + d);
      }
    }
    if (i >= LengthAt(layout_.query_lengths, b, g_.query_length)) dq.assign(size, kNaN);
    StoreAll(layout_.query_gradient, row * size, dq);
  }

  void StoreAll(int64_t place, int64_t first, const std::vector<double>& values) {
    for (size_t n = 0; n < values.size(); ++n) {
      StoreElement(arena_ + place, g_.dtype, first + static_cast<int64_t>(n), values[n]);
    }
  }

  const SdpaGraph& g_;
  const ArenaLayout& layout_;
  std::byte* arena_;
  const std::byte* pages_;
};

// Decrements a positive count; returns whether it was positive.
bool Take(std::atomic<int>& count) {
  int left = count;
  while (left > 0 && !count.compare_exchange_weak(left, left - 1)) {
  }
  return left > 0;
}

// Accessed only by copies, although it is host memory.
class ObjectMemory final : public DeviceMemory {
 public:
  ObjectMemory(std::byte* begin, int64_t size) : begin_(begin), size_(size) {}
  ~ObjectMemory() override { munmap(begin_, static_cast<size_t>(size_)); }

  int64_t size() const override { return size_; }
  absl::Status Read(int64_t offset, absl::Span<std::byte> target) const override {
    std::memcpy(target.data(), begin_ + offset, target.size());
    return absl::OkStatus();
  }
  absl::Status Write(int64_t offset, absl::Span<const std::byte> source) const override {
    std::memcpy(begin_ + offset, source.data(), source.size());
    return absl::OkStatus();
  }

 private:
  std::byte* const begin_;
  const int64_t size_;
};

}  // namespace

class FakeDevice::FakeLane final : public cudnn::Lane {
 public:
  FakeLane(Controls& controls, int64_t arena_bytes, absl::Span<std::byte> pages)
      : controls_(controls), pages_(pages), host_(arena_bytes), device_(arena_bytes) {
    // Unwritten memory is NaN in every type.
    std::memset(host_.data(), 0xff, arena_bytes);
    std::memset(device_.data(), 0xff, arena_bytes);
  }

  absl::Span<std::byte> host() override { return host_.span(); }

  absl::Status Run(const SdpaGraph& graph, const CompiledPlan& plan,
                   const ArenaLayout& layout) override {
    ++controls_.runs;
    controls_.on_run();
    controls_.on_graph(graph, layout);
    if (busy_.exchange(true)) return absl::InternalError("two workers are on one lane");
    absl::Status status = Compute(graph, plan, layout);
    busy_ = false;
    return status;
  }

  absl::Status SendPages(absl::Span<const cudnn::PageCopy> copies) override {
    if (Take(controls_.failures)) return absl::UnavailableError("the device was told to fail");
    for (const cudnn::PageCopy& copy : copies) {
      controls_.sent_page_bytes += copy.rows * copy.row_bytes;
      for (int64_t n = 0; n < copy.rows; ++n) {
        std::memcpy(&pages_.at(copy.to + n * copy.step),
                    host_.data() + copy.from + n * copy.row_bytes, copy.row_bytes);
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Compute(const SdpaGraph& graph, const CompiledPlan& plan,
                       const ArenaLayout& layout) {
    const std::string key = graph.Key();
    if (plan.bytes != std::vector<uint8_t>(key.begin(), key.end())) {
      return absl::InternalError("the plan was compiled for another graph");
    }
    const int64_t bytes = layout.end + plan.workspace_bytes;
    int64_t most = controls_.most_bytes;
    while (most < bytes && !controls_.most_bytes.compare_exchange_weak(most, bytes)) {
    }
    if (bytes > static_cast<int64_t>(device_.size())) {
      return absl::InternalError("the tensors exceed the lane's memory");
    }
    if (Take(controls_.failures)) return absl::UnavailableError("the device was told to fail");
    std::memcpy(device_.data(), host_.data(), layout.outputs);
    if (controls_.computes) Kernel(graph, layout, device_.data(), pages_.data()).Run();
    std::memcpy(host_.data() + layout.outputs, device_.data() + layout.outputs,
                layout.end - layout.outputs);
    return absl::OkStatus();
  }

  Controls& controls_;
  const absl::Span<std::byte> pages_;  // of the device
  AlignedBuffer host_;
  AlignedBuffer device_;
  std::atomic<bool> busy_{false};
};

FakeDevice::FakeDevice(Controls& controls, int lanes, int64_t arena_bytes,
                       int64_t page_memory_bytes)
    : controls_(controls), arena_bytes_(arena_bytes), pages_(page_memory_bytes) {
  LosePages();
  for (int n = 0; n < lanes; ++n) {
    lanes_.push_back(std::make_unique<FakeLane>(controls, arena_bytes, pages_.span()));
  }
}

FakeDevice::~FakeDevice() = default;

void FakeDevice::LosePages() {
  std::fill(pages_.data(), pages_.data() + pages_.size(), std::byte{0xff});
}

cudnn::Lane& FakeDevice::lane(int n) { return *lanes_.at(n); }

absl::StatusOr<CompiledPlan> FakeDevice::Compile(const SdpaGraph& graph) {
  ++controls_.compilations;
  controls_.on_compile();
  if (controls_.declines) return absl::UnimplementedError("the device was told to decline");
  const std::string key = graph.Key();
  return CompiledPlan{{key.begin(), key.end()}, controls_.workspace_bytes};
}

absl::Status FakeDevice::Restart() {
  ++controls_.restarts;
  LosePages();
  if (Take(controls_.failing_restarts)) return absl::UnavailableError("told to stay down");
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const DeviceMemory>> FakeDevice::OpenShared(
    absl::string_view raw_handle, int64_t device_id, int64_t byte_size) {
  if (device_id != 0) return absl::InvalidArgumentError("the only device is 0");
  const std::string name(raw_handle.substr(0, raw_handle.find('\0')));
  const int object = shm_open(name.c_str(), O_RDWR, 0);
  if (object < 0) return absl::InvalidArgumentError("the handle is not valid");
  struct stat status;
  const bool fits = fstat(object, &status) == 0 && byte_size <= status.st_size;
  void* const begin = fits ? mmap(nullptr, static_cast<size_t>(byte_size), PROT_READ | PROT_WRITE,
                                  MAP_SHARED, object, 0)
                           : MAP_FAILED;
  close(object);
  if (begin == MAP_FAILED) return absl::InvalidArgumentError("the allocation is too small");
  return std::make_shared<ObjectMemory>(static_cast<std::byte*>(begin), byte_size);
}

}  // namespace rapt::test
