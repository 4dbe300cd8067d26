// The metrics page of a server under test.
#ifndef RAPT_TESTS_SUPPORT_METRICS_PAGE_H_
#define RAPT_TESTS_SUPPORT_METRICS_PAGE_H_

#include <map>
#include <string>

#include "absl/functional/function_ref.h"
#include "tests/support/server_process.h"

namespace rapt::test {

std::string ReadMetricsPage(const ServerProcess& server);

// The sum over all series of `name` that have these labels, of a counter, a gauge, or a histogram's
// name_count and name_sum; -1 where there is none. The page is text as the server sends it.
double SumOnPage(const std::string& page, const std::string& name,
                 const std::map<std::string, std::string>& labels = {});

double ReadMetric(const ServerProcess& server, const std::string& name,
                  const std::map<std::string, std::string>& labels = {});

// Blocks until the page is as it should be. The test fails, with `what` and the page, where it is
// not after two minutes.
void WaitForPage(const ServerProcess& server, const std::string& what,
                 absl::FunctionRef<bool(const std::string& page)> is_as_it_should_be);

// Blocks until it is `value`.
void WaitForMetric(const ServerProcess& server, const std::string& name, double value,
                   const std::map<std::string, std::string>& labels = {});

// Blocks until the server computes a request: its message has arrived and a thread is busy.
void WaitUntilComputing(const ServerProcess& server);

// Blocks until all memory of calls is released.
void WaitUntilNothingIsHeld(const ServerProcess& server);

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_METRICS_PAGE_H_
