// Plain TCP and HTTP to a server under test.
#ifndef RAPT_TESTS_SUPPORT_LOOPBACK_H_
#define RAPT_TESTS_SUPPORT_LOOPBACK_H_

#include <string>

namespace rapt::test {

// Returns a socket connected to "127.0.0.1:43211" or "[::1]:43211", from the IP address `from` of
// this machine; empty: any. The caller closes it.
int ConnectTo(const std::string& address, const std::string& from = "");

// Sends the bytes to "127.0.0.1:43211" and reads until the other side closes.
std::string Exchange(const std::string& address, const std::string& bytes);

// Returns the whole response, including headers.
std::string HttpGet(const std::string& address, const std::string& path);

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_LOOPBACK_H_
