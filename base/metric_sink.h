// Where components register the numbers that they export, without knowing who publishes them.
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

  // Registers one time series. `read` is called from any thread as long as the sink publishes.
  // REQUIRES: the name's other series have other labels, and the same kind and help.
  virtual void AddGauge(const std::string& name, const std::string& help, Labels labels,
                        std::function<double()> read) = 0;
  virtual void AddCounter(const std::string& name, const std::string& help, Labels labels,
                          std::function<double()> read) = 0;
};

}  // namespace rapt

#endif  // RAPT_BASE_METRIC_SINK_H_
