#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/terminal_heat_map.h"
#include "client/console/json.h"
#include "client/console/server_connection.h"

namespace rapt {
namespace {

constexpr size_t kWords = 6;
constexpr size_t kFeatures = 6;
using WordFeatures = std::array<std::array<float, kFeatures>, kWords>;

const std::array<std::string, kWords> kSentence = {"the₁", "cat", "sat", "on", "the₂", "mat"};

// The keys and values: the features of each word.
constexpr WordFeatures kIs = {{
    // article, noun, verb, preposition, animal, position in the sentence
    {1, 0, 0, 0, 0, -1.0f},  // the
    {0, 1, 0, 0, 1, -0.6f},  // cat
    {0, 0, 1, 0, 0, -0.2f},  // sat
    {0, 0, 0, 1, 0, +0.2f},  // on
    {1, 0, 0, 0, 0, +0.6f},  // the
    {0, 1, 0, 0, 0, +1.0f},  // mat
}};

// The queries: the features that each word looks for. An article looks for a noun nearby, a verb
// for its subject, a preposition for the word after it, a noun for its verb or preposition.
constexpr WordFeatures kLooksFor = {{
    {1, 5, 0, 0, 0, -3},  // the
    {3, 2, 6, 0, 0, -1},  // cat
    {0, 0, 2, 3, 6, -1},  // sat
    {0, 5, 3, 1, 0, +3},  // on
    {1, 5, 0, 0, 0, +3},  // the
    {2, 2, 2, 6, 3, +1},  // mat
}};

// Attention between the words, and how it was computed.
struct WordAttention {
  std::vector<double> weights;  // [kWords, kWords]
  std::string backend, plan;
  double round_trip_ms = 0;

  size_t MostAttended(size_t word) const {
    const auto row = weights.begin() + word * kWords;
    return std::max_element(row, row + kWords) - row;
  }
  double Weight(size_t word, size_t other) const { return weights[word * kWords + other]; }
};

client::TensorView View(const WordFeatures& features) {
  return client::View<float>({1, 1, kWords, kFeatures},
                             {features.front().data(), kWords * kFeatures});
}

absl::StatusOr<WordAttention> Attend(client::Client& server, bool causal) {
  const auto start = std::chrono::steady_clock::now();
  const absl::StatusOr<client::AttendResult> result =
      server.Attend({.q = View(kLooksFor),
                     .k = View(kIs),
                     .v = View(kIs),
                     .causal = causal,
                     .score_output = client::ScoreOutput::kWeights});
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;
  if (!result.ok()) return result.status();
  const absl::Span<const float> weights = result->scores->values<float>();
  return WordAttention{
      {weights.begin(), weights.end()}, result->backend, result->plan, elapsed.count()};
}

TextBlock DescribeWords(const WordAttention& attention) {
  TextBlock block;
  for (size_t word = 0; word < kWords; ++word) {
    const size_t most = attention.MostAttended(word);
    block.Add(absl::StrFormat("'%s' attends most to '%s' (%.1f%%)", kSentence[word],
                              kSentence[most], attention.Weight(word, most) * 100));
  }
  return block;
}

void Print(const WordAttention& full, const WordAttention& causal, const std::string& address) {
  const Terminal terminal = Terminal::OfStdout();
  TextBlock left = DrawTerminalHeatMap("every word sees every word", kSentence, full.weights,
                                       terminal.has_colour);
  TextBlock right = DrawTerminalHeatMap("causal: no word sees ahead", kSentence, causal.weights,
                                        terminal.has_colour);
  left.Append(DescribeWords(full));
  right.Append(DescribeWords(causal));
  std::fputs(
      "\n  the cat sat on the mat\n\n"
      "Each word has six hand-made numbers for what it is, and six for what it looks\n"
      "for. Rows attend to columns; the weights of a row, in percent, add up to 100.\n\n",
      stdout);
  std::fputs(Arrange(left, right, terminal.columns).c_str(), stdout);
  absl::PrintF("\nComputed by %s at %s, plan %s;\nround trips of %.1f and %.1f ms.\n", full.backend,
               address, full.plan, full.round_trip_ms, causal.round_trip_ms);
}

void WriteJson(const WordAttention& attention, JsonWriter& json) {
  json.BeginObject().Key("weights").BeginArray();
  for (size_t word = 0; word < kWords; ++word) {
    json.BeginArray();
    for (size_t other = 0; other < kWords; ++other) json.Number(attention.Weight(word, other));
    json.EndArray();
  }
  json.EndArray().Key("attends_most_to").BeginArray();
  for (size_t word = 0; word < kWords; ++word) json.Integer(attention.MostAttended(word));
  json.EndArray().Key("backend").String(attention.backend);
  json.Key("plan").String(attention.plan);
  json.Key("round_trip_ms").Number(attention.round_trip_ms).EndObject();
}

void PrintJson(const WordAttention& full, const WordAttention& causal, const std::string& address) {
  JsonWriter json;
  json.BeginObject().Key("address").String(address).Key("words").Strings(kSentence);
  json.Key("full");
  WriteJson(full, json);
  json.Key("causal");
  WriteJson(causal, json);
  json.EndObject();
  std::puts(json.Take().c_str());
}

}  // namespace

ExitCode RunDemoCommand(CommandArguments arguments) {
  ServerFlags flags;
  bool as_json = false;
  const CommandLine line{
      .usage = "rapt demo [flags]",
      .summary =
          "Sends \"the cat sat on the mat\" to a server and shows which word "
          "attends to which, without and with a causal mask.",
      .flags = Joined({flags.Table(), {{"json", "", "print the weights as JSON", &as_json}}}),
      .examples = {"rapt demo", "rapt demo --address 127.0.0.1:8001 --json"}};
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments)) return *done;
  RAPT_ASSIGN_OR_EXIT(const auto server, FailConnect, Connect(flags));
  RAPT_ASSIGN_OR_EXIT(const WordAttention full, FailCall, Attend(*server, /*causal=*/false));
  RAPT_ASSIGN_OR_EXIT(const WordAttention causal, FailCall, Attend(*server, /*causal=*/true));
  (as_json ? PrintJson : Print)(full, causal, flags.address);
  return ExitCode::kOk;
}

}  // namespace rapt
