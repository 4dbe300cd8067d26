// Times attention over resident keys and values, for cache_bench.py. Reads a command per line and
// answers with one line of seconds.
//
//     kernel DTYPE HQ HKV N T VARIANT   N sequences of T tokens, one row each, D 128. VARIANT:
//                                       contiguous, paged (pages in random order), forks (of one
//                                       prefix of T tokens, read together) or apart (each for
//                                       itself)
//     read                              bytes per second of pure reading instead
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "attention/attention.h"
#include "attention/mechanism/softmax/ragged_attention.h"
#include "base/aligned_buffer.h"
#include "base/check.h"
#include "base/thread_pool.h"
#include "bench/probes.h"
#include "bench/random_tensor.h"
#include "server/cache/arena.h"
#include "server/cache/page_list.h"

namespace rapt::bench {
namespace {

constexpr int64_t kSize = 128;
constexpr int64_t kRowBlock = 64;

struct Shape {
  DType dtype;
  int64_t query_heads, kv_heads, sequences, tokens;

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
  Sequences(const Shape& shape, bool are_forks)
      : arena_(2 * Bytes(shape, are_forks) + (int64_t{64} << 20)) {
    const cache::TokenShape token = {shape.kv_heads, kSize, kSize, shape.dtype};
    const int64_t lists = are_forks ? 1 : shape.sequences;
    const RandomTensor rows(shape.dtype, {1, kRowBlock, shape.kv_heads, kSize});
    for (int64_t n = 0; n < lists; ++n) lists_.emplace_back(arena_, token);
    std::mt19937 random(7);
    std::vector<int64_t> order;
    for (int64_t n = 0; n < lists; ++n) {
      order.insert(order.end(), static_cast<size_t>(shape.tokens / kRowBlock), n);
    }
    std::shuffle(order.begin(), order.end(), random);
    for (int64_t n : order) {
      RAPT_CHECK(lists_[n].Reserve(kRowBlock).ok(), "the arena is large enough");
      lists_[n].Append(kRowBlock, rows.View().data, rows.View().data);
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

// One plan with its tensors.
class Job {
 public:
  virtual ~Job() = default;
  virtual void Run(ThreadPool& pool) = 0;

  double Time(ThreadPool& pool) {
    const auto begin = std::chrono::steady_clock::now();
    Run(pool);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
};

class Contiguous final : public Job {
 public:
  Contiguous(const Shape& s, int threads)
      : query_(s.dtype, {s.sequences, s.query_heads, 1, kSize}),
        key_(s.dtype, {s.sequences, s.kv_heads, s.tokens, kSize}),
        value_(s.dtype, {s.sequences, s.kv_heads, s.tokens, kSize}),
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
  RandomTensor query_, key_, value_, output_;
  Plan plan_;
  AlignedBuffer workspace_;
  Arguments arguments_;
};

// Plans every run anew, as the server does.
class Ragged final : public Job {
 public:
  Ragged(const Shape& s, bool are_forks, bool shares, int threads)
      : threads_(threads),
        source_(s, are_forks),
        query_(s.dtype, {1, s.sequences, s.query_heads, kSize}),
        output_(s.dtype, {1, s.sequences, s.query_heads, kSize}) {
    call_.items.assign(static_cast<size_t>(s.sequences),
                       {.rows = 1, .keys = s.tokens, .position = s.tokens - 1});
    call_.dtype = s.dtype;
    call_.query_heads = s.query_heads;
    call_.kv_heads = s.kv_heads;
    call_.head_size = call_.value_head_size = kSize;
    (void)shares;
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

std::unique_ptr<Job> MakeJob(const Shape& shape, const std::string& variant, int threads) {
  if (variant == "contiguous") return std::make_unique<Contiguous>(shape, threads);
  RAPT_CHECK(variant == "paged" || variant == "forks" || variant == "apart", "a known VARIANT");
  return std::make_unique<Ragged>(shape, variant != "paged", variant == "forks", threads);
}

int Main(int argc, char** argv) {
  const int threads = argc > 1 ? std::stoi(argv[1]) : 1;
  ThreadPool pool(threads);
  std::map<std::pair<Shape, std::string>, std::unique_ptr<Job>> jobs;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command, dtype, variant;
    words >> command;
    if (command == "read") {
      std::cout << rapt_probe_read_gbps(threads) * 1e9 << std::endl;
      continue;
    }
    if (command == "forget") {
      jobs.clear();
      std::cout << 0 << std::endl;
      continue;
    }
    Shape shape;
    words >> dtype >> shape.query_heads >> shape.kv_heads >> shape.sequences >> shape.tokens >>
        variant;
    shape.dtype = TypeOf(dtype);
    std::unique_ptr<Job>& job = jobs[{shape, variant}];
    if (job == nullptr) {
      job = MakeJob(shape, variant, threads);
      job->Run(pool);
    }
    std::cout << job->Time(pool) << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace rapt::bench

int main(int argc, char** argv) { return rapt::bench::Main(argc, argv); }
