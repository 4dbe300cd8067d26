#include "tests/client/cpp/dns_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace rapt::test {
namespace {

// RFC 1035
constexpr size_t kHeaderBytes = 12;
constexpr uint16_t kAuthoritativeResponse = 0x8580;
constexpr uint16_t kNameOfTheQuestion = 0xC00C;
constexpr uint16_t kTypeA = 1;
constexpr uint16_t kClassInternet = 1;

void Append16(uint16_t number, std::string& bytes) {
  bytes += static_cast<char>(number >> 8);
  bytes += static_cast<char>(number & 0xFF);
}

uint16_t Read16(const std::string& bytes, size_t at) {
  return static_cast<uint16_t>((static_cast<uint8_t>(bytes.at(at)) << 8) |
                               static_cast<uint8_t>(bytes.at(at + 1)));
}

// Returns the offset after the name that begins at `at`.
size_t EndOfName(const std::string& bytes, size_t at) {
  while (bytes.at(at) != 0) at += static_cast<uint8_t>(bytes.at(at)) + 1;
  return at + 1;
}

}  // namespace

DnsServer::DnsServer() : socket_(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const name = reinterpret_cast<sockaddr*>(&address);
  RAPT_CHECK(bind(socket_.get(), name, size) == 0, "no UDP port");
  RAPT_CHECK(getsockname(socket_.get(), name, &size) == 0, "no name of the UDP port");
  port_ = ntohs(address.sin_port);
  thread_ = std::thread([this] { Serve(); });
}

DnsServer::~DnsServer() {
  shutdown(socket_.get(), SHUT_RDWR);  // ends recvfrom()
  thread_.join();
}

std::string DnsServer::TargetOf(int port) const {
  return absl::StrCat("dns://127.0.0.1:", port_, "/rapt.test:", port);
}

void DnsServer::Serve() {
  std::string query(512, '\0');
  for (;;) {
    sockaddr_in peer = {};
    socklen_t size = sizeof(peer);
    auto* const name = reinterpret_cast<sockaddr*>(&peer);
    const ssize_t count = recvfrom(socket_.get(), query.data(), query.size(), 0, name, &size);
    if (count <= 0) return;
    const std::string response = Respond(query.substr(0, static_cast<size_t>(count)));
    sendto(socket_.get(), response.data(), response.size(), 0, name, size);
  }
}

std::string DnsServer::Respond(const std::string& query) const {
  const size_t end_of_name = EndOfName(query, kHeaderBytes);
  std::vector<std::string> addresses;
  if (Read16(query, end_of_name) == kTypeA) {
    MutexLock lock(mutex_);
    addresses = addresses_;
  }
  std::string response = query.substr(0, 2);  // the identifier
  Append16(kAuthoritativeResponse, response);
  Append16(1, response);
  Append16(static_cast<uint16_t>(addresses.size()), response);
  response += std::string(4, '\0');
  response += query.substr(kHeaderBytes, end_of_name + 4 - kHeaderBytes);
  for (const std::string& text : addresses) {
    in_addr address;
    RAPT_CHECK(inet_pton(AF_INET, text.c_str(), &address) == 1, "not an IPv4 address");
    Append16(kNameOfTheQuestion, response);
    Append16(kTypeA, response);
    Append16(kClassInternet, response);
    response += std::string(4, '\0');  // time to live
    Append16(sizeof(address), response);
    response.append(reinterpret_cast<const char*>(&address), sizeof(address));
  }
  return response;
}

}  // namespace rapt::test
