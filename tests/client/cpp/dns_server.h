// A DNS server on loopback, for names whose addresses change. Needs no privileges.
#ifndef RAPT_TESTS_CLIENT_CPP_DNS_SERVER_H_
#define RAPT_TESTS_CLIENT_CPP_DNS_SERVER_H_

#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/descriptor.h"
#include "base/mutex.h"

namespace rapt::test {

// Every name has the same IPv4 addresses, and no others. Thread-safe.
class DnsServer {
 public:
  DnsServer();
  ~DnsServer();
  DnsServer(const DnsServer&) = delete;
  DnsServer& operator=(const DnsServer&) = delete;

  // Returns a gRPC target for a name that this server resolves.
  std::string TargetOf(int port) const;

  int port() const { return port_; }  // UDP

  // "127.0.0.1"
  void SetAddresses(std::vector<std::string> addresses) {
    MutexLock lock(mutex_);
    addresses_ = std::move(addresses);
  }

 private:
  void Serve();
  std::string Respond(const std::string& query) const;

  const Descriptor socket_;
  int port_ = 0;
  mutable Mutex mutex_;
  std::vector<std::string> addresses_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_CLIENT_CPP_DNS_SERVER_H_
