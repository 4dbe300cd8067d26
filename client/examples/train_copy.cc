// Example: trains a tiny multi-head attention model to copy. Usage: train_copy [HOST:PORT]
// [FILE.svg]
//
// A sequence has kLength random tokens followed by as many blanks; the model shall write token i
// into blank i. It has one layer:
//
//     X = embedding[token] + position[s]
//     Q, K, V = X Wq, X Wk, X Wv           in kHeads heads
//     Y = softmax(Q K^T / sqrt(D)) V       on the server
//     logits = (X + Y Wo) Wu               for each token
//
// To copy, a blank has to find the position that is kLength earlier: the weights of the trained
// model are a diagonal. The server computes Y and lse, and from them and dY the gradients of Q, K
// and V; everything else is here, in plain loops. Adam (Kingma and Ba 2015) updates the parameters.
// Prints the loss every 20 steps and writes the weights before and after as a picture.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "rapt/client.h"

namespace {

using rapt::client::AttendResult;
using rapt::client::BackwardResult;
using rapt::client::Client;
using rapt::client::TensorView;

constexpr int kTokens = 8;  // and one more, the blank
constexpr int kLength = 6;  // tokens to copy
constexpr int kSequence = 2 * kLength;
constexpr int kBatch = 32;
constexpr int kRows = kBatch * kSequence;
constexpr int kHeads = 2;
constexpr int kWidth = 32;  // of X; kHeads heads of 16
constexpr int kSteps = 200;
constexpr double kRate = 0.003;

using Matrix = std::vector<float>;  // row-major

// A parameter with its gradient and Adam's moments.
struct Parameter {
  Parameter(int rows, int columns, std::mt19937& random)
      : value(rows * columns), gradient(value.size()), mean(value.size()), square(value.size()) {
    std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(columns)));
    for (float& x : value) x = normal(random);
  }

  void Update(int step) {
    constexpr double kMean = 0.9, kSquare = 0.999, kTiny = 1e-8;
    for (size_t n = 0; n < value.size(); ++n) {
      mean[n] = kMean * mean[n] + (1 - kMean) * gradient[n];
      square[n] = kSquare * square[n] + (1 - kSquare) * gradient[n] * gradient[n];
      const double m = mean[n] / (1 - std::pow(kMean, step));
      const double v = square[n] / (1 - std::pow(kSquare, step));
      value[n] -= static_cast<float>(kRate * m / (std::sqrt(v) + kTiny));
      gradient[n] = 0;
    }
  }

  Matrix value, gradient;
  std::vector<double> mean, square;
};

// c += a b, with a [rows][depth] and b [depth][columns].
void Multiply(const float* a, const float* b, int rows, int depth, int columns, float* c) {
  for (int r = 0; r < rows; ++r) {
    for (int k = 0; k < depth; ++k) {
      for (int n = 0; n < columns; ++n) c[r * columns + n] += a[r * depth + k] * b[k * columns + n];
    }
  }
}

// y += x w, and its gradients: dw += x^T dy, dx += dy w^T.
void Project(const Matrix& x, const Parameter& w, int in, int out, Matrix& y) {
  Multiply(x.data(), w.value.data(), kRows, in, out, y.data());
}

void ProjectBack(const Matrix& x, const float* dy, int in, int out, Parameter& w, Matrix& dx) {
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < in; ++i) {
      float sum = 0;
      for (int o = 0; o < out; ++o) {
        w.gradient[i * out + o] += x[r * in + i] * dy[r * out + o];
        sum += dy[r * out + o] * w.value[i * out + o];
      }
      dx[r * in + i] += sum;
    }
  }
}

// kBatch sequences [kSequence] of tokens; the second half is blank.
std::vector<int> RandomBatch(std::mt19937& random) {
  std::vector<int> tokens(kRows, kTokens);
  for (int row = 0; row < kRows; ++row) {
    if (row % kSequence < kLength) tokens[row] = static_cast<int>(random() % kTokens);
  }
  return tokens;
}

class Model {
 public:
  explicit Model(std::mt19937& random)
      : embedding_(kTokens + 1, kWidth, random),
        position_(kSequence, kWidth, random),
        query_(kWidth, kWidth, random),
        key_(kWidth, kWidth, random),
        value_(kWidth, kWidth, random),
        output_(kWidth, kWidth, random),
        logits_(kWidth, kTokens, random) {}

  // The projections of a batch, before the server's part.
  void Embed(const std::vector<int>& tokens) {
    tokens_ = tokens;
    x_.assign(kRows * kWidth, 0);
    for (int row = 0; row < kRows; ++row) {
      for (int n = 0; n < kWidth; ++n) {
        x_[row * kWidth + n] = embedding_.value[tokens[row] * kWidth + n] +
                               position_.value[row % kSequence * kWidth + n];
      }
    }
    for (const auto& [parameter, result] :
         {std::pair{&query_, &q_}, {&key_, &k_}, {&value_, &v_}}) {
      result->assign(kRows * kWidth, 0);
      Project(x_, *parameter, kWidth, kWidth, *result);
    }
  }

  // [B, S, H * D]
  TensorView q() const { return View(q_); }
  TensorView k() const { return View(k_); }
  TensorView v() const { return View(v_); }

  // Returns the mean cross entropy of the blanks, and the gradient of Y.
  double Loss(const Matrix& y, Matrix& dy) {
    Matrix hidden = x_;
    Project(y, output_, kWidth, kWidth, hidden);
    Matrix logits(kRows * kTokens);
    Project(hidden, logits_, kWidth, kTokens, logits);
    double loss = 0;
    for (int row = 0; row < kRows; ++row) {
      float* const scores = &logits[row * kTokens];
      if (row % kSequence < kLength) {
        std::fill(scores, scores + kTokens, 0);  // not a blank: no gradient
      } else {
        loss += CrossEntropy(scores, tokens_[row - kLength]);
      }
    }
    dx_.assign(kRows * kWidth, 0);
    ProjectBack(hidden, logits.data(), kWidth, kTokens, logits_, dx_);
    dy.assign(kRows * kWidth, 0);
    ProjectBack(y, dx_.data(), kWidth, kWidth, output_, dy);
    return loss;
  }

  // Given the gradients of Q, K and V, updates the parameters.
  void Learn(const BackwardResult& gradients, int step) {
    const auto back = [&](const rapt::client::Tensor& gradient, Parameter& parameter) {
      ProjectBack(x_, gradient.values<float>().data(), kWidth, kWidth, parameter, dx_);
    };
    back(*gradients.dq, query_);
    back(*gradients.dk, key_);
    back(*gradients.dv, value_);
    for (int row = 0; row < kRows; ++row) {
      for (int n = 0; n < kWidth; ++n) {
        embedding_.gradient[tokens_[row] * kWidth + n] += dx_[row * kWidth + n];
        position_.gradient[row % kSequence * kWidth + n] += dx_[row * kWidth + n];
      }
    }
    for (Parameter* parameter :
         {&embedding_, &position_, &query_, &key_, &value_, &output_, &logits_}) {
      parameter->Update(step);
    }
  }

 private:
  static TensorView View(const Matrix& matrix) {
    return rapt::client::View<float>({kBatch, kSequence, kWidth}, matrix);
  }

  // Returns a blank's share of the loss, and turns its scores into their gradient.
  static double CrossEntropy(float* scores, int target) {
    constexpr double kShare = 1.0 / (kBatch * kLength);
    double sum = 0;
    for (int n = 0; n < kTokens; ++n) sum += std::exp(scores[n]);
    const double loss = std::log(sum) - scores[target];
    for (int n = 0; n < kTokens; ++n) {
      scores[n] = static_cast<float>(kShare * (std::exp(scores[n]) / sum - (n == target ? 1 : 0)));
    }
    return kShare * loss;
  }

  Parameter embedding_, position_, query_, key_, value_, output_, logits_;
  std::vector<int> tokens_;
  Matrix x_, q_, k_, v_, dx_;
};

rapt::client::AttendCall CallOf(const Model& model) {
  return {
      .q = model.q(), .k = model.k(), .v = model.v(), .query_heads = kHeads, .kv_heads = kHeads};
}

// One step of training. Returns the loss.
absl::StatusOr<double> Step(Client& client, Model& model, int step) {
  rapt::client::AttendCall call = CallOf(model);
  call.wants_lse = true;
  const absl::StatusOr<AttendResult> forward = client.Attend(call);
  if (!forward.ok()) return forward.status();
  const absl::Span<const float> y = forward->y.values<float>();
  Matrix dy;
  const double loss = model.Loss(Matrix(y.begin(), y.end()), dy);

  rapt::client::BackwardCall backward = {.call = CallOf(model)};
  backward.dy = rapt::client::View<float>({kBatch, kSequence, kWidth}, dy);
  backward.y = forward->y.view();
  backward.lse = forward->lse->view();
  const absl::StatusOr<BackwardResult> gradients = client.AttendBackward(backward);
  if (!gradients.ok()) return gradients.status();
  model.Learn(*gradients, step);
  return loss;
}

// Returns the weights of the first sequence, [heads][queries][keys].
absl::StatusOr<Matrix> Weights(Client& client, Model& model, const std::vector<int>& tokens) {
  model.Embed(tokens);
  rapt::client::AttendCall call = CallOf(model);
  call.score_output = rapt::client::ScoreOutput::kWeights;
  const absl::StatusOr<AttendResult> result = client.Attend(call);
  if (!result.ok()) return result.status();
  const absl::Span<const float> weights = result->scores->values<float>();
  return Matrix(weights.begin(), weights.begin() + kHeads * kSequence * kSequence);
}

// A heat map for each head; the weights before training are above those after it.
void DrawWeights(const std::vector<Matrix>& maps, const std::string& path) {
  constexpr int kCell = 14, kGap = 40, kSide = kSequence * kCell + kGap;
  std::ofstream svg(path);
  svg << "<svg xmlns='http://www.w3.org/2000/svg' width='" << kHeads * kSide + kGap << "' height='"
      << maps.size() * kSide + kGap << "' font-family='sans-serif' font-size='12'>\n"
      << "<rect width='100%' height='100%' fill='white'/>\n";
  for (size_t map = 0; map < maps.size(); ++map) {
    for (int h = 0; h < kHeads; ++h) {
      const int left = kGap + h * kSide, top = kGap + static_cast<int>(map) * kSide;
      svg << "<text x='" << left << "' y='" << top - 8 << "'>" << (map == 0 ? "before" : "after")
          << ", head " << h << "</text>\n";
      for (int cell = 0; cell < kSequence * kSequence; ++cell) {
        const float weight = maps[map][h * kSequence * kSequence + cell];
        const int shade = 255 - static_cast<int>(std::lround(255 * weight));
        svg << "<rect x='" << left + cell % kSequence * kCell << "' y='"
            << top + cell / kSequence * kCell << "' width='" << kCell << "' height='" << kCell
            << "' fill='rgb(" << shade << "," << shade << ",255)' stroke='#ddd'/>\n";
      }
    }
  }
  svg << "</svg>\n";
}

absl::Status Train(Client& client, const std::string& picture) {
  std::mt19937 random(1);
  Model model(random);
  const std::vector<int> shown = RandomBatch(random);
  const absl::StatusOr<Matrix> before = Weights(client, model, shown);
  if (!before.ok()) return before.status();
  for (int step = 1; step <= kSteps; ++step) {
    model.Embed(RandomBatch(random));
    const absl::StatusOr<double> loss = Step(client, model, step);
    if (!loss.ok()) return loss.status();
    if (step == 1 || step % 20 == 0) std::printf("step %3d: loss %.4f\n", step, *loss);
  }
  const absl::StatusOr<Matrix> after = Weights(client, model, shown);
  if (!after.ok()) return after.status();
  DrawWeights({*before, *after}, picture);
  std::printf("weights before and after: %s\n", picture.c_str());
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  const absl::StatusOr<std::unique_ptr<Client>> client =
      Client::Connect(argc > 1 ? argv[1] : "127.0.0.1:8001");
  const absl::Status status =
      client.ok() ? Train(**client, argc > 2 ? argv[2] : "train_copy.svg") : client.status();
  if (status.ok()) return 0;
  std::fprintf(stderr, "train_copy: %s\n", status.ToString().c_str());
  return 1;
}
