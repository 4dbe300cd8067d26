// The metrics page of a server under test.
#ifndef RAPT_TESTS_SUPPORT_METRICS_PAGE_H_
#define RAPT_TESTS_SUPPORT_METRICS_PAGE_H_

#include <map>
#include <string>

#include "absl/functional/function_ref.h"
#include "tests/support/server_process.h"

namespace rapt::test {

std::string ReadMetricsPage(const ServerProcess& server);

// Returns the sum over all series of `name` with these labels, -1 if there are none. `name` is a
// counter, a gauge, or a histogram's name_count or name_sum.
double SumOnPage(const std::string& page, const std::string& name,
                 const std::map<std::string, std::string>& labels = {});

double ReadMetric(const ServerProcess& server, const std::string& name,
                  const std::map<std::string, std::string>& labels = {});

// Blocks until `condition` is true of the page. After two minutes the test fails with `what` and
// the page.
void WaitForPage(const ServerProcess& server, const std::string& what,
                 absl::FunctionRef<bool(const std::string& page)> condition);

// Blocks until the metric is `value`.
void WaitForMetric(const ServerProcess& server, const std::string& name, double value,
                   const std::map<std::string, std::string>& labels = {});

// Blocks until the server computes a request, whose message then has arrived.
void WaitUntilComputing(const ServerProcess& server);

// Blocks until all memory of calls is released.
void WaitUntilNothingIsHeld(const ServerProcess& server);

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_METRICS_PAGE_H_
