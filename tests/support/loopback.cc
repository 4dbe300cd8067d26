#include "tests/support/loopback.h"

#include <gtest/gtest.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>

#include "absl/strings/str_cat.h"

namespace rapt::test {
namespace {

struct FreeName {
  void operator()(addrinfo* name) const { freeaddrinfo(name); }
};
using Name = std::unique_ptr<addrinfo, FreeName>;

Name NameOf(const std::string& host, const std::string& port) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* name = nullptr;
  EXPECT_EQ(getaddrinfo(host.c_str(), port.c_str(), &hints, &name), 0) << host;
  return Name(name);
}

}  // namespace

int ConnectTo(const std::string& address, const std::string& from) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.front() == '[') host = host.substr(1, host.size() - 2);
  const Name name = NameOf(host, address.substr(colon + 1));
  const int connection = socket(name->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (!from.empty()) {
    const Name source = NameOf(from, "0");
    EXPECT_EQ(bind(connection, source->ai_addr, source->ai_addrlen), 0) << from;
  }
  EXPECT_EQ(connect(connection, name->ai_addr, name->ai_addrlen), 0);
  return connection;
}

std::string Exchange(const std::string& address, const std::string& bytes) {
  const int connection = ConnectTo(address);
  EXPECT_EQ(send(connection, bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  shutdown(connection, SHUT_WR);
  std::string answer;
  char buffer[4096];
  for (ssize_t n; (n = read(connection, buffer, sizeof(buffer))) > 0;) answer.append(buffer, n);
  close(connection);
  return answer;
}

std::string HttpGet(const std::string& address, const std::string& path) {
  return Exchange(address, absl::StrCat("GET ", path, " HTTP/1.0\r\n\r\n"));
}

}  // namespace rapt::test
