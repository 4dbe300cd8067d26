#include "tests/support/loopback.h"

#include <gtest/gtest.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace rapt::test {

int ConnectTo(const std::string& address) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* name = nullptr;
  EXPECT_EQ(getaddrinfo(host.c_str(), address.substr(colon + 1).c_str(), &hints, &name), 0);
  const int connection = socket(name->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(connection, name->ai_addr, name->ai_addrlen), 0);
  freeaddrinfo(name);
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
