// Example: a toy decoder whose keys and values stay on the server. Usage: decode [HOST:PORT], of a
// rapt-server with --kv_cache_bytes.
//
// Two layers of attention continue a sequence that repeats (an induction head, Olsson et al. 2022):
//
//     layer 0: a query looks for the position before its own and copies the word there
//     layer 1: a query looks for a position whose previous word is its own word, and copies the
//              word there, which is what followed before
//
// The weights are made by hand, so the model needs no training. The prompt is sent once. A step
// sends the query, key and value of one word for each layer. A fork continues with another word.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "rapt/cache.h"
#include "rapt/client.h"

namespace {

using rapt::client::Cache;
using rapt::client::Client;

constexpr int kSize = 32;  // of a word's and a position's vector, and of the one head
constexpr float kSharpness = 20;

using Vector = std::vector<float>;
const std::vector<std::string> kWords = {"red", "green", "blue", "yellow", "black"};

Vector Word(int word) {
  Vector one_hot(kSize, 0.0F);
  one_hot[static_cast<size_t>(word)] = 1;
  return one_hot;
}

// The product of two of these is largest if the positions are equal.
Vector Position(int position) {
  Vector waves(kSize);
  for (size_t n = 0; n < kSize / 2; ++n) {
    const auto angle = static_cast<float>(position) * std::pow(0.6F, static_cast<float>(n));
    waves[2 * n] = std::cos(angle);
    waves[2 * n + 1] = std::sin(angle);
  }
  return waves;
}

void Add(const Vector& from, float scale, Vector& rows) {
  for (float value : from) rows.push_back(scale * value);
}

// Appends the rows to a layer and attends with them: one row for each word.
absl::StatusOr<Vector> Attend(Cache& cache, int layer, const Vector& q, const Vector& k,
                              const Vector& v) {
  const auto view = [](const Vector& rows) {
    return rapt::client::View<float>({static_cast<int64_t>(rows.size()) / kSize, 1, kSize}, rows);
  };
  const auto result =
      cache.Attend({.layer = layer, .q = view(q), .k = view(k), .v = view(v), .scale = kSharpness});
  if (!result.ok()) return result.status();
  const absl::Span<const float> y = result->y.values<float>();
  return Vector(y.begin(), y.end());
}

// Gives the words from position `first` on to the model. Returns the word that it expects next.
absl::StatusOr<int> Step(Cache& cache, const std::vector<int>& words, int first) {
  Vector q, k, v;
  for (size_t n = 0; n < words.size(); ++n) {
    const int position = first + static_cast<int>(n);
    Add(Position(position - 1), 1, q);
    Add(Position(position), 1, k);
    Add(Word(words[n]), 1, v);
  }
  const absl::StatusOr<Vector> previous = Attend(cache, 0, q, k, v);
  if (!previous.ok()) return previous.status();
  const absl::StatusOr<Vector> next = Attend(cache, 1, v, *previous, v);
  if (!next.ok()) return next.status();
  const auto last = next->end() - kSize;
  return static_cast<int>(std::max_element(last, next->end()) - last);
}

// Prints `count` words that the model expects after `word`.
absl::Status Continue(Cache& cache, int word, int count) {
  for (int n = 0; n < count; ++n) {
    std::printf(" %s", kWords[static_cast<size_t>(word)].c_str());
    const auto position = static_cast<int>(cache.lengths()[0]);
    const absl::StatusOr<int> next = Step(cache, {word}, position);
    if (!next.ok()) return next.status();
    word = *next;
  }
  std::printf("\n");
  return absl::OkStatus();
}

absl::Status Run(Client& client) {
  absl::StatusOr<Cache> cache = rapt::client::CreateCache(
      client, {.shapes = {{.layers = 2, .kv_heads = 1, .head_size = kSize}}});
  if (!cache.ok()) return cache.status();
  const std::vector<int> prompt = {0, 1, 2, 3, 4, 0, 1};
  std::printf("prompt:   ");
  for (int word : prompt) std::printf(" %s", kWords[static_cast<size_t>(word)].c_str());
  std::printf("\n");
  const absl::StatusOr<int> next = Step(*cache, prompt, 0);
  if (!next.ok()) return next.status();

  absl::StatusOr<Cache> fork = cache->Fork();
  if (!fork.ok()) return fork.status();
  std::printf("continues:");
  if (absl::Status status = Continue(*cache, *next, 8); !status.ok()) return status;
  std::printf("the fork: ");
  return Continue(*fork, 4, 8);
}

}  // namespace

int main(int argc, char** argv) {
  const absl::StatusOr<std::unique_ptr<Client>> client =
      Client::Connect(argc > 1 ? argv[1] : "127.0.0.1:8001");
  const absl::Status status = client.ok() ? Run(**client) : client.status();
  if (status.ok()) return 0;
  std::fprintf(stderr, "decode: %s\n", status.ToString().c_str());
  return 1;
}
