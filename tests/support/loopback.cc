#include "tests/support/loopback.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace rapt::test {

int ConnectTo(const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(address.substr(colon + 1), &port));
  sockaddr_in name = {};
  name.sin_family = AF_INET;
  name.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, address.substr(0, colon).c_str(), &name.sin_addr);
  const int connection = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(connection, reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
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
