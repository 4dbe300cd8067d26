
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_format.h"
#include "attention/half.h"
#include "base/status_macros.h"
#include "client/cli/figures.h"
#include "client/cli/tensor_file.h"

namespace rapt {
namespace {

struct GradientCurve {
  std::string name;
  std::vector<double> norms;  // of each position
};

absl::StatusOr<GradientCurve> CurveOf(std::string name, const NpyArray& array, int64_t batch,
                                      const std::string& dtype) {
  RAPT_ASSIGN_OR_RETURN(const DType type, FloatTypeOf(array, name, dtype));
  Shape shape = array.shape;
  if (shape.size() < 2 || shape.size() > 4 || array.size() == 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s has shape %s; a gradient by position is [S, D], [B, S, E] or [B, H, S, D], not empty",
        name, ToString(array.shape)));
  }
  if (shape.size() == 3) shape.insert(shape.begin() + 1, 1);
  while (shape.size() < 4) shape.insert(shape.begin(), 1);
  if (batch < 0 || batch >= shape[0]) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--batch is %d; %s has batch rows 0 to %d", batch, name, shape[0] - 1));
  }
  const int64_t heads = shape[1], positions = shape[2], size = shape[3];
  GradientCurve curve{std::move(name), std::vector<double>(positions)};
  for (int64_t n = 0; n < heads * positions * size; ++n) {
    const double value =
        LoadElement(array.bytes().data(), type, batch * heads * positions * size + n);
    curve.norms[n / size % positions] += value * value;
  }
  for (double& norm : curve.norms) norm = std::sqrt(norm);
  return curve;
}

// Reads the gradients that `reference` names.
absl::Status Load(const std::string& reference, int64_t batch, const std::string& dtype,
                  std::vector<GradientCurve>* curves) {
  const auto add = [&](std::string name, const absl::StatusOr<NpyArray>& array) {
    if (!array.ok()) return array.status();
    RAPT_ASSIGN_OR_RETURN(GradientCurve curve, CurveOf(std::move(name), *array, batch, dtype));
    curves->push_back(std::move(curve));
    return absl::OkStatus();
  };
  const std::string file = reference.substr(reference.rfind('/') + 1);
  if (!IsNpz(reference)) return add(file, LoadArray(reference, ""));
  RAPT_ASSIGN_OR_RETURN(const NpzArchive archive, NpzArchive::Open(reference));
  const size_t before = curves->size();
  for (const char* name : {"dq", "dk", "dv"}) {
    if (!archive.Has(name)) continue;
    RAPT_RETURN_IF_ERROR(add(name, archive.Read(name)));
  }
  if (curves->size() > before) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s has no member dq, dk or dv; name one, such as %s:d_past_key", reference, file));
}

}  // namespace

absl::StatusOr<AttentionFigure> LoadGradientFigure(const std::vector<std::string>& references,
                                                   int64_t batch, const std::string& dtype) {
  std::vector<GradientCurve> curves;
  for (const std::string& reference : references) {
    RAPT_RETURN_IF_ERROR(Load(reference, batch, dtype, &curves));
  }
  if (curves.size() > kMaxCurves) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d gradients are given; a picture has at "
                        "most %d",
                        curves.size(), kMaxCurves));
  }
  size_t positions = 0;
  for (const GradientCurve& curve : curves) positions = std::max(positions, curve.norms.size());
  AttentionFigure figure;
  HeadWeights& norms = figure.heads.emplace_back();
  for (size_t position = 0; position < positions; ++position) {
    for (const GradientCurve& curve : curves) {
      norms.values.push_back(position < curve.norms.size()
                                 ? curve.norms[position]
                                 : std::numeric_limits<double>::quiet_NaN());
    }
  }
  for (GradientCurve& curve : curves) figure.key_labels.push_back(std::move(curve.name));
  return figure;
}

}  // namespace rapt
