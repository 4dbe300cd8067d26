// The interface through which components export metrics, independent of how they are published.
#ifndef RAPT_BASE_METRIC_SINK_H_
#define RAPT_BASE_METRIC_SINK_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace rapt {

class MetricSink {
 public:
  using Labels = std::vector<std::pair<std::string, std::string>>;  // name, value

  virtual ~MetricSink() = default;

  // Registers one time series. `read` may be called from any thread while the sink exists.
  // REQUIRES: other series of this name have different labels and the same kind and help.
  virtual void AddGauge(const std::string& name, const std::string& help, Labels labels,
                        std::function<double()> read) = 0;
  virtual void AddCounter(const std::string& name, const std::string& help, Labels labels,
                          std::function<double()> read) = 0;
};

}  // namespace rapt

#endif  // RAPT_BASE_METRIC_SINK_H_
