// Example: self-attention of three tokens on a server. Usage: attend [HOST:PORT]
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "rapt/client.h"

namespace {

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "attend: %s\n", status.ToString().c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  using rapt::client::Client;
  const absl::StatusOr<std::unique_ptr<Client>> client =
      Client::Connect(argc > 1 ? argv[1] : "127.0.0.1:8001");
  if (!client.ok()) return Fail(client.status());

  const std::vector<float> x = {1, 0, 1, 0,  //
                                0, 1, 0, 1,  //
                                1, 1, 0, 0};
  const auto tokens = rapt::client::View<float>({1, 1, 3, 4}, x);  // [B, H, S, D]
  const absl::StatusOr<rapt::client::AttendResult> result =
      (*client)->Attend({.q = tokens,
                         .k = tokens,
                         .v = tokens,
                         .causal = true,
                         .score_output = rapt::client::ScoreOutput::kWeights},
                        {.timeout = std::chrono::seconds(5)});
  if (!result.ok()) return Fail(result.status());

  const absl::Span<const float> y = result->y.values<float>();
  const absl::Span<const float> weights = result->scores->values<float>();
  for (int i = 0; i < 3; ++i) {
    std::printf("token %d: weights %.4f %.4f %.4f, y %.4f %.4f %.4f %.4f\n", i, weights[3 * i],
                weights[3 * i + 1], weights[3 * i + 2], y[4 * i], y[4 * i + 1], y[4 * i + 2],
                y[4 * i + 3]);
  }
  return 0;
}
