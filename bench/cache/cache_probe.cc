// Times attention over resident keys and values, for cache_bench.py. Reads a command per line and
// answers with one line of seconds.
//
//     kernel DTYPE HQ HKV N T VARIANT   N sequences of T tokens, one row each, D 128. VARIANT:
//                                       contiguous, paged (pages in random order), int8 (the same,
//                                       stored in 8 bits), forks (of one prefix of T tokens, read
//                                       together) or apart (each for itself)
//     read                              bytes per second of pure reading instead
//     forget                            drops the tensors of earlier commands
//     serve ADDRESS DTYPE HQ HKV N T    makes N caches of T tokens on a server
//     step                              appends a token to each and attends, in one call
//     calls                             the same in a call for each cache, from four threads
//     wire                              one Attend that carries the keys and values of T tokens
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention/mechanism/softmax/ragged_attention.h"
#include "attention/q8_0.h"
#include "base/aligned_buffer.h"
#include "base/buffer_pool.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/thread_pool.h"
#include "bench/probes.h"
#include "bench/random_tensor.h"
#include "rapt/cache.h"
#include "rapt/client.h"
#include "server/cache/arena.h"
#include "server/cache/page_list.h"

namespace rapt::bench {
namespace {

constexpr int64_t kSize = 128;
constexpr int64_t kRowBlock = 64;

struct Shape {
  DType dtype;
  int64_t query_heads, kv_heads, sequences, tokens;

  // NOLINTNEXTLINE(modernize-use-nullptr): a false positive of the defaulted comparison.
  auto operator<=>(const Shape&) const = default;
};

DType TypeOf(const std::string& name) {
  for (DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (NameOf(type) == name) return type;
  }
  RAPT_CHECK(false, "DTYPE is FP32, FP16 or BF16");
}

// Sequences of random tokens in pages that were taken in random order.
class Sequences final : public RaggedSource {
 public:
  Sequences(const Shape& shape, bool are_forks, bool q8_0)
      : arena_(2 * Bytes(shape, are_forks) + (int64_t{64} << 20)) {
    const cache::TokenShape token = {shape.kv_heads, kSize, kSize, shape.dtype, q8_0};
    const int64_t lists = are_forks ? 1 : shape.sequences;
    const RandomTensor numbers(shape.dtype, {1, kRowBlock, shape.kv_heads, kSize});
    std::vector<std::byte> rows(static_cast<size_t>(kRowBlock * token.key_bytes()));
    for (int64_t n = 0; n < kRowBlock * shape.kv_heads; ++n) {
      const std::byte* const from = numbers.View().data + n * kSize * SizeOf(shape.dtype);
      std::byte* const to = rows.data() + n * token.key_row_bytes();
      if (q8_0) {
        q8_0::StoreRow(from, shape.dtype, kSize, to);
      } else {
        std::memcpy(to, from, static_cast<size_t>(token.key_row_bytes()));
      }
    }
    for (int64_t n = 0; n < lists; ++n) lists_.emplace_back(arena_, token);
    std::mt19937 random(7);
    std::vector<int64_t> order;
    for (int64_t n = 0; n < lists; ++n) {
      order.insert(order.end(), static_cast<size_t>(shape.tokens / kRowBlock), n);
    }
    std::shuffle(order.begin(), order.end(), random);
    for (int64_t n : order) {
      RAPT_CHECK(lists_[n].Reserve(kRowBlock).ok(), "the arena is large enough");
      lists_[n].Append(kRowBlock, rows.data(), rows.data());
    }
    while (static_cast<int64_t>(lists_.size()) < shape.sequences) {
      lists_.push_back(lists_[0].Fork(shape.tokens));
    }
    for (const cache::PageList& list : lists_) snapshots_.push_back(list.Take(shape.tokens));
  }

  TensorView keys(int64_t item) const override { return snapshots_[item].keys(); }
  TensorView values(int64_t item) const override { return snapshots_[item].values(); }
  bool has_failed(int64_t) const override { return false; }

 private:
  static int64_t Bytes(const Shape& s, bool are_forks) {
    return (are_forks ? 1 : s.sequences) * s.tokens * s.kv_heads * 2 * kSize * SizeOf(s.dtype);
  }

  cache::Arena arena_;
  std::vector<cache::PageList> lists_;
  std::vector<cache::Snapshot> snapshots_;
};

// K or V in memory as the server has it for a call's tensors: in huge pages, like those of caches.
class ServedRows {
 public:
  explicit ServedRows(const Shape& s) : shape_(s) {
    static const SteadyClock clock;
    static BufferPool pool(0, clock);
    bytes_ = pool.Take(s.sequences * s.kv_heads * s.tokens * kSize * SizeOf(s.dtype));
    FillWithRandom(s.dtype, bytes_.span());
  }

  TensorView View() const {
    const std::array<int64_t, 4> dims = {shape_.sequences, shape_.kv_heads, shape_.tokens, kSize};
    return {bytes_.data(), shape_.dtype, dims, RowMajorStrides(dims)};
  }

 private:
  Shape shape_;
  PooledBuffer bytes_;
};

// One plan with its tensors.
class Job {
 public:
  virtual ~Job() = default;
  virtual void Run(ThreadPool& pool) = 0;
};

class Contiguous final : public Job {
 public:
  Contiguous(const Shape& s, int threads)
      : query_(s.dtype, {s.sequences, s.query_heads, 1, kSize}),
        key_(s),
        value_(s),
        output_(s.dtype, {s.sequences, s.query_heads, 1, kSize}) {
    Problem p;
    p.dtype = s.dtype;
    p.batch = s.sequences;
    p.query_heads = s.query_heads;
    p.kv_heads = s.kv_heads;
    p.query_length = 1;
    p.key_length = s.tokens;
    p.head_size = p.value_head_size = kSize;
    plan_ = MakePlan(p, {.threads = threads}).value();
    workspace_ = AlignedBuffer(static_cast<size_t>(plan_.workspace_bytes()));
    arguments_.inputs[Role::kQ] = query_.View();
    arguments_.inputs[Role::kK] = key_.View();
    arguments_.inputs[Role::kV] = value_.View();
    arguments_.outputs[Role::kY] = output_.MutableView();
  }

  void Run(ThreadPool& pool) override {
    RAPT_CHECK(rapt::Run(plan_, arguments_, workspace_.span(), pool).ok(), "the run succeeds");
  }

 private:
  RandomTensor query_;
  ServedRows key_, value_;
  RandomTensor output_;
  Plan plan_;
  AlignedBuffer workspace_;
  Arguments arguments_;
};

// Plans every run anew, as the server does.
class Ragged final : public Job {
 public:
  Ragged(const Shape& s, const std::string& variant, int threads)
      : threads_(threads),
        source_(s, variant == "forks" || variant == "apart", variant == "int8"),
        query_(s.dtype, {1, s.sequences, s.query_heads, kSize}),
        output_(s.dtype, {1, s.sequences, s.query_heads, kSize}) {
    call_.items.assign(static_cast<size_t>(s.sequences),
                       {.rows = 1, .keys = s.tokens, .position = s.tokens - 1});
    call_.dtype = s.dtype;
    call_.q8_0 = variant == "int8";
    call_.query_heads = s.query_heads;
    call_.kv_heads = s.kv_heads;
    call_.head_size = call_.value_head_size = kSize;
    if (variant == "forks") {
      call_.prefixes = {{.tokens = s.tokens}};
      for (int64_t n = 0; n < s.sequences; ++n) call_.prefixes[0].items.push_back(n);
    }
    arguments_.inputs[Role::kQ] = query_.View();
    arguments_.outputs[Role::kY] = output_.MutableView();
  }

  void Run(ThreadPool& pool) override {
    const auto op = MakeRaggedAttention(call_, source_).value();
    const Plan plan = MakePlan(*op, {.threads = threads_}).value();
    if (static_cast<int64_t>(workspace_.span().size()) < plan.workspace_bytes()) {
      workspace_ = AlignedBuffer(static_cast<size_t>(plan.workspace_bytes()));
    }
    RAPT_CHECK(rapt::Run(*op, plan, arguments_, workspace_.span(), pool).ok(), "the run succeeds");
  }

 private:
  const int threads_;
  const Sequences source_;
  RandomTensor query_, output_;
  RaggedCall call_;
  AlignedBuffer workspace_;
  Arguments arguments_;
};

void Check(const absl::Status& status) {
  RAPT_CHECK(status.ok(), std::string(status.message()).c_str());
}

client::DType ClientType(DType type) {
  return type == DType::kFloat32   ? client::DType::kFloat32
         : type == DType::kFloat16 ? client::DType::kFloat16
                                   : client::DType::kBFloat16;
}

// Caches of one layer on a server, whose sequences grow by a token with each step.
class Served {
 public:
  Served(const std::string& address, const Shape& shape)
      : shape_(shape), rows_(shape.dtype, {1, 1, kMostRows, kSize}) {
    client_ = *client::Client::Connect(address, {.shared_memory = false});
    for (int64_t n = 0; n < shape.sequences; ++n) {
      caches_.push_back(*client::CreateCache(
          *client_, {.shapes = {{.layers = 1, .kv_heads = shape.kv_heads, .head_size = kSize}},
                     .dtype = ClientType(shape.dtype)}));
      const auto prompt = View({shape.tokens, shape.kv_heads, kSize});
      Check(caches_.back().Append(0, prompt, prompt).status());
    }
    for (client::Cache& cache : caches_) {
      items_.push_back({.cache = &cache, .rows = 1, .new_tokens = 1});
    }
  }

  void Step() { Check(client::AttendCaches(items_, CallOf(shape_.sequences)).status()); }

  void Calls() {
    constexpr size_t kThreads = 4;
    std::vector<std::thread> threads;
    for (size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([this, t] {
        for (size_t n = t; n < caches_.size(); n += kThreads) {
          Check(caches_[n].Attend(CallOf(1)).status());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void Wire() {
    const auto keys = View({1, shape_.kv_heads, shape_.tokens, kSize});
    Check(client_->Attend({.q = View({1, shape_.query_heads, 1, kSize}), .k = keys, .v = keys})
              .status());
  }

 private:
  static constexpr int64_t kMostRows = 32 * 4096;

  client::TensorView View(const client::Shape& shape) const {
    int64_t bytes = SizeOf(shape_.dtype);
    for (int64_t axis : shape) bytes *= axis;
    RAPT_CHECK(bytes <= kMostRows * kSize * SizeOf(shape_.dtype), "the rows are enough");
    return {ClientType(shape_.dtype), shape, {rows_.View().data, static_cast<size_t>(bytes)}};
  }

  client::CacheAttendCall CallOf(int64_t sequences) const {
    return {.layer = 0,
            .q = View({sequences, shape_.query_heads, kSize}),
            .k = View({sequences, shape_.kv_heads, kSize}),
            .v = View({sequences, shape_.kv_heads, kSize})};
  }

  const Shape shape_;
  const RandomTensor rows_;
  std::unique_ptr<client::Client> client_;
  std::vector<client::Cache> caches_;
  std::vector<client::CacheItem> items_;
};

template <typename Run>
double Time(const Run& run) {
  const auto begin = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::unique_ptr<Job> MakeJob(const Shape& shape, const std::string& variant, int threads) {
  if (variant == "contiguous") return std::make_unique<Contiguous>(shape, threads);
  RAPT_CHECK(variant == "paged" || variant == "int8" || variant == "forks" || variant == "apart",
             "a known VARIANT");
  return std::make_unique<Ragged>(shape, variant, threads);
}

Shape ReadShape(std::istream& words) {
  std::string dtype;
  Shape shape;
  words >> dtype >> shape.query_heads >> shape.kv_heads >> shape.sequences >> shape.tokens;
  shape.dtype = TypeOf(dtype);
  return shape;
}

// Answers commands; keeps what they need between them.
class Probe {
 public:
  explicit Probe(int threads) : threads_(threads), pool_(threads) {}

  double Answer(const std::string& line) {
    std::istringstream words(line);
    std::string command;
    words >> command;
    if (command == "kernel") return Kernel(words);
    if (command == "read") return rapt_probe_read_gbps(threads_) * 1e9;
    if (command == "serve") {
      std::string address;
      words >> address;
      const Shape shape = ReadShape(words);
      served_ = nullptr;
      served_ = std::make_unique<Served>(address, shape);
      return 0;
    }
    if (command == "step") return Time([this] { served_->Step(); });
    if (command == "calls") return Time([this] { served_->Calls(); });
    if (command == "wire") return Time([this] { served_->Wire(); });
    RAPT_CHECK(command == "forget", "a known command");
    jobs_.clear();
    served_ = nullptr;
    return 0;
  }

 private:
  double Kernel(std::istream& words) {
    const Shape shape = ReadShape(words);
    std::string variant;
    words >> variant;
    std::unique_ptr<Job>& job = jobs_[{shape, variant}];
    if (job == nullptr) {
      job = MakeJob(shape, variant, threads_);
      job->Run(pool_);
    }
    return Time([&] { job->Run(pool_); });
  }

  const int threads_;
  ThreadPool pool_;
  std::map<std::pair<Shape, std::string>, std::unique_ptr<Job>> jobs_;
  std::unique_ptr<Served> served_;
};

int Main(int argc, char** argv) {
  Probe probe(argc > 1 ? std::stoi(argv[1]) : 1);
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << probe.Answer(line) << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace rapt::bench

int main(int argc, char** argv) { return rapt::bench::Main(argc, argv); }
