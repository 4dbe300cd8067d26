// The Open Inference Protocol over HTTP, against requests that no client library sends.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/support/memory_watch.h"
#include "tests/support/metrics_page.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kInfer[] = "/v2/models/attention/infer";
constexpr char kTraceparent[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

// An input of one token with a head of one element.
std::string Input(absl::string_view name, absl::string_view value,
                  absl::string_view datatype = "FP32") {
  return absl::StrCat(R"({"name":")", name, R"(","shape":[1,1,1,1],"datatype":")", datatype,
                      R"(","data":[)", value, "]}");
}

// The weight of a single key is 1, so Y is V.
std::string Call(absl::string_view v, absl::string_view datatype = "FP32",
                 absl::string_view more = "") {
  return absl::StrCat("{\"inputs\":[", Input("Q", "1", datatype), ",", Input("K", "1", datatype),
                      ",", Input("V", v, datatype), "]", more, "}");
}

std::string OneInput(absl::string_view name, absl::string_view data, absl::string_view datatype) {
  return absl::StrCat("{\"inputs\":[", Input(name, data, datatype), "]}");
}

// An input of `tokens` rows of 64 elements, whose binary data follows.
std::string BinaryInput(absl::string_view name, int64_t tokens, int64_t bytes) {
  return absl::StrCat(R"({"name":")", name, R"(","shape":[1,1,)", tokens,
                      R"(,64],"datatype":"FP32","parameters":{"binary_data_size":)", bytes, "}}");
}

std::string BinaryInputs(int64_t tokens, int64_t bytes) {
  return absl::StrCat("{\"inputs\":[", BinaryInput("Q", tokens, bytes), ",",
                      BinaryInput("K", tokens, bytes), ",", BinaryInput("V", tokens, bytes), "]}");
}

std::string JsonLength(absl::string_view json) {
  return absl::StrCat("Inference-Header-Content-Length: ", json.size(), "\r\n");
}

// A call that computes for seconds.
std::string LongCall() {
  constexpr int64_t kTokens = 16384;
  const std::string json = BinaryInputs(kTokens, kTokens * 256);
  return RequestText("POST", kInfer, json + std::string(3 * kTokens * 256, '\0'), JsonLength(json));
}

class RestTest : public ::testing::Test {
 protected:
  explicit RestTest(const std::vector<std::string>& flags = {}) : server_(flags) {}

  RawResponse Infer(absl::string_view body, absl::string_view headers = "") {
    return RawHttp(server_.http_address()).Ask(RequestText("POST", kInfer, body, headers));
  }
  RawResponse Get(absl::string_view path, absl::string_view headers = "") {
    return RawHttp(server_.http_address()).Ask(RequestText("GET", path, "", headers));
  }

  ServerProcess server_;
};

// --- Inference -----------------------------------------------------------------------------------

TEST_F(RestTest, NumbersInAndOut) {
  const RawResponse response = Infer(Call("0.1", "FP32", R"(,"id":"a\u0000\"é")"));
  EXPECT_EQ(response.status, 200) << response.body;
  EXPECT_EQ(response.Value("content-type"), "application/json");
  EXPECT_EQ(response.body,
            R"({"id":"a\u0000\"é","model_name":"attention","model_version":"1","outputs":[)"
            R"({"name":"Y","datatype":"FP32","shape":[1,1,1,1],"data":[0.1]}]})");
}

TEST_F(RestTest, EveryTypeAndWhatIsNotFinite) {
  const auto data = [&](absl::string_view v, absl::string_view datatype) {
    const std::string body = Infer(Call(v, datatype)).body;
    const size_t begin = body.find("\"data\":[");
    return begin == std::string::npos ? body
                                      : body.substr(begin + 8, body.find(']', begin) - begin - 8);
  };
  EXPECT_EQ(data("65504", "FP16"), "65504");
  EXPECT_EQ(data("1.5", "BF16"), "1.5");
  EXPECT_EQ(data("1e-320", "FP64"), "1e-320");
  EXPECT_EQ(data("3.4028234663852886e38", "FP32"), "3.4028235e+38");
  EXPECT_EQ(data("1e-400", "FP32"), "0");
  for (const char* value : {"\"Infinity\"", "\"-Infinity\"", "\"NaN\""}) {
    EXPECT_EQ(data(value, "FP32"), value);
  }
}

TEST_F(RestTest, ProtocolBuffersAreAskedForByTheirMediaType) {
  const auto type_for = [&](absl::string_view accept) {
    const RawResponse response = Get("/rapt/v1/server", absl::StrCat("Accept: ", accept, "\r\n"));
    EXPECT_EQ(response.status, 200) << response.body;
    return std::string(response.Value("content-type"));
  };
  EXPECT_EQ(type_for("application/x-protobuf"), "application/x-protobuf");
  EXPECT_EQ(type_for("text/html, application/x-protobuf ; q=0.9, */*"), "application/x-protobuf");
  EXPECT_EQ(type_for("application/x-protobufs, */*"), "application/json");
}

TEST_F(RestTest, DataMayBeNestedAndComeFirst) {
  const std::string body =
      R"({"inputs":[{"data":[[[[1]]]],"datatype":"FP32","shape":[1,1,1,1],"name":"Q"},)"
      R"({"name":"K","data":[1],"shape":[1,1,1,1],"datatype":"FP32"},)" +
      Input("V", "7") + "]}";
  EXPECT_THAT(Infer(body).body, HasSubstr("\"data\":[7]"));
}

TEST_F(RestTest, BinaryDataBothWays) {
  std::string tensors(3 * 64 * 4, '\0');
  const float one = 1;
  for (int i = 0; i < 64; ++i) std::memcpy(&tensors[(128 + i) * 4], &one, 4);
  std::string json = BinaryInputs(1, 256);
  EXPECT_THAT(Infer(json + tensors, JsonLength(json)).body, HasSubstr("\"data\":[1,1,1,"));
  json.replace(json.size() - 1, 1, R"(,"parameters":{"binary_data_output":true}})");
  const RawResponse response = Infer(json + tensors, JsonLength(json));
  EXPECT_EQ(response.Value("content-type"), "application/octet-stream");
  size_t header = 0;
  ASSERT_TRUE(absl::SimpleAtoi(response.Value("inference-header-content-length"), &header));
  EXPECT_THAT(response.body.substr(0, header),
              HasSubstr("\"parameters\":{\"binary_data_size\":256}"));
  EXPECT_EQ(response.body.substr(header), tensors.substr(512));
}

TEST_F(RestTest, RejectsWrongRequestsAndNamesWhatIsWrong) {
  const std::pair<std::string, const char*> cases[] = {
      {"", "the JSON is invalid: line 1, column 1 (byte 1): syntax error"},
      {"[]", "where an object or a field is expected"},
      {"{", "the JSON is invalid: line 1, column 2 (byte 2): syntax error"},
      {"{} {}", "the JSON is invalid: line 1, column 4 (byte 4): syntax error"},
      {Call("1") + std::string("\0]]]]garbage", 12), ": a NUL byte"},
      {Call("1", "FP32", R"(,"id":"a","id":"a")"), "the JSON is invalid: id is given twice"},
      {Call("1", "FP32", R"(,"inputs":[])"), "the JSON is invalid: inputs is given twice"},
      {Call("1", "FP32", R"(,"parameters":{"scale":1,"scale":2})"),
       "the JSON is invalid: parameters.scale is given twice"},
      {Call("1", "FP32", R"(,"outputs":[{"name":"Y","name":"Y"}])"),
       "the JSON is invalid: outputs.name is given twice"},
      {R"({"input":[]})", "Q is missing"},
      {R"({"id":7})", "field id of the wrong type"},
      {Call("1e39"), "input V has 1e+39 in data of FP32"},
      {Call("65520", "FP16"), "input V has 65520 in data of FP16"},
      {Call("3.4e38", "BF16"), "input V has 3.4e+38 in data of BF16"},
      {Call("1e400"), "): number overflow parsing '1e400'"},
      {Call("NaN"), "input V has invalid data: line 1, column "},
      {Call("null"), "input V has null in data"},
      {Call("{}"), "input V has an object in data"},
      {Call("\"inf\""), "input V has 'inf' in data of FP32"},
      {Call("1,2"), "input V has 2 values in data; its shape [1, 1, 1, 1] needs 1"},
      {Call(std::string(20, '[') + "1" + std::string(20, ']')), "levels of arrays"},
      {Call(std::string(100000, '[')), "levels of arrays"},
      {Call("1", "FP8"), "datatype 'FP8'"},
      {OneInput("attn_mask", "2", "BOOL"), "input attn_mask has 2 in data of BOOL"},
      {OneInput("nonpad_kv_seqlen", "1.5", "INT64"),
       "input nonpad_kv_seqlen has 1.5 in data of INT64"},
      {OneInput("nonpad_kv_seqlen", "9223372036854775808", "INT64"),
       "input nonpad_kv_seqlen has 9223372036854775808 in data of INT64"},
      {"{\"inputs\":[{\"name\":\"Q\xff\"}]}", "(byte 22): syntax error"},
      {R"({"inputs":[{"name":"Q","shape":[1],"datatype":"FP32"}]})", "it must have one"},
      {R"({"inputs":[{"name":"Q","shape":[1e3],"datatype":"FP32"}]})", "must have integers"},
      {R"({"inputs":[{"name":"Q","shape":[4611686018427387904,4],"datatype":"FP32","data":[]}]})",
       "input Q"},
      {R"({"inputs":[{"name":"Q","shape":[1000000000],"datatype":"FP32","data":[1]}]})",
       "input Q has 1 values in data; its shape [1000000000] needs 1000000000"},
      {absl::StrCat("{\"inputs\":[{}", absl::StrJoin(std::vector<std::string>(64, ",{}"), ""),
                    "]}"),
       "more than 64 inputs"},
      {absl::StrCat("{\"inputs\":[{\"shape\":[1",
                    absl::StrJoin(std::vector<std::string>(64, ",1"), ""), "]}]}"),
       "more than 64 extents"},
      {Call("1", "FP32", R"(,"parameters":{"is_casual":true})"), "is_casual"},
      {Call("1", "FP32", R"(,"parameters":{"scale":[1]})"), "parameter scale is an array"},
      {Call("1", "FP32", R"(,"outputs":[{"name":"Z"}])"), "unknown output Z"},
      {Call("1", "FP32", R"(,"outputs":[{"name":"Y","parameters":{"binary_data":1}}])"),
       "binary_data"},
  };
  for (const auto& [body, message] : cases) {
    const RawResponse response = Infer(body);
    EXPECT_EQ(response.status, 400) << body.substr(0, 300);
    EXPECT_THAT(response.body, AllOf(StartsWith("{\"error\":\""), HasSubstr(message)))
        << body.substr(0, 300);
  }
  EXPECT_EQ(Infer(Call("1")).status, 200);
}

TEST_F(RestTest, RequestsWithoutTensorsAreReadAsStrictly) {
  const auto ask = [&](absl::string_view path, absl::string_view body) {
    return RawHttp(server_.http_address()).Ask(RequestText("POST", path, body));
  };
  EXPECT_EQ(ask("/v2/repository/index", R"({"ready":true})").status, 200);
  const std::pair<absl::string_view, const char*> cases[] = {
      {R"({"ready":true,"ready":false})", "the JSON is invalid: ready is given twice"},
      {R"({"ready":true}])", "the JSON is invalid: line 1, column 15 (byte 15): syntax error"},
      {absl::string_view("{}\0", 3), "the JSON is invalid: line 1, column 3 (byte 3): a NUL byte"},
      {"{\n\"ready\":tru}", "the JSON is invalid: line 2, column 12 (byte 14): syntax error"},
      {"[]", "the body must be a JSON object"},
  };
  for (const auto& [body, message] : cases) {
    const RawResponse response = ask("/v2/repository/index", body);
    EXPECT_EQ(response.status, 400) << body;
    EXPECT_THAT(response.body, HasSubstr(message)) << body;
  }
  const std::string call = R"({"call":{"q":{"dtype":"FP32","shape":[1],"data":[1]}}})";
  EXPECT_THAT(ask("/rapt/v1/attend", call + std::string("\0]]]]garbage", 12)).body,
              HasSubstr("a NUL byte"));
}

TEST_F(RestTest, LyingLengthsAreRefused) {
  const std::string json = BinaryInputs(1, 256);
  const std::string tensors(3 * 256, '\0');
  EXPECT_THAT(Infer(json + tensors + "x", JsonLength(json)).body,
              HasSubstr("1 bytes after the data of the inputs"));
  EXPECT_THAT(Infer(json + tensors.substr(1), JsonLength(json)).body,
              HasSubstr("input V has binary_data_size 256; the body has 255 more bytes"));
  for (const char* length : {"-1", "x", "99999999999999999999", "100000", "+1", "1 1", "",
                             "1\r\nInference-Header-Content-Length: 1"}) {
    EXPECT_THAT(
        Infer(json + tensors, absl::StrCat("Inference-Header-Content-Length: ", length, "\r\n"))
            .body,
        HasSubstr("header inference-header-content-length is"))
        << length;
  }
}

TEST_F(RestTest, AModelOrVersionThatIsUnknownIsNotFound) {
  for (const char* path : {"/v2/models/none/infer", "/v2/models/attention/versions/2/infer"}) {
    const RawResponse response =
        RawHttp(server_.http_address()).Ask(RequestText("POST", path, Call("1")));
    EXPECT_EQ(response.status, 404) << response.body;
  }
  EXPECT_EQ(RawHttp(server_.http_address())
                .Ask(RequestText("POST", "/v2/models/attention/versions/1/infer", Call("1")))
                .status,
            200);
}

// --- Framing -------------------------------------------------------------------------------------

TEST_F(RestTest, ChunksMayBeTiny) {
  RawHttp connection(server_.http_address());
  std::string request = absl::StrCat("POST ", kInfer,
                                     " HTTP/1.1\r\nHost: localhost\r\n"
                                     "Transfer-Encoding: chunked\r\n\r\n");
  for (const char byte : Call("7"))
    absl::StrAppend(&request, "1\r\n", std::string(1, byte), "\r\n");
  for (int n = 0; n < 2; ++n) {
    const RawResponse response = connection.Ask(request + "0\r\n\r\n");
    EXPECT_EQ(response.status, 200) << response.body;
    EXPECT_THAT(response.body, HasSubstr("\"data\":[7]"));
  }
}

// 3 MiB arrive in three slabs, of which the tensors are parts.
TEST_F(RestTest, AChunkedBodyMayBeLongerThanASlab) {
  const int64_t tokens = 4096;
  std::string json = BinaryInputs(tokens, tokens * 256);
  const std::string body = json + std::string(3 * tokens * 256, '\0');
  RawHttp connection(server_.http_address());
  connection.Send(absl::StrCat("POST ", kInfer, " HTTP/1.1\r\nHost: localhost\r\n",
                               JsonLength(json), "Transfer-Encoding: chunked\r\n\r\n"));
  for (size_t begin = 0; begin < body.size(); begin += 300000) {
    const std::string part = body.substr(begin, 300000);
    connection.Send(absl::StrCat(absl::Hex(part.size()), "\r\n", part, "\r\n"));
  }
  const RawResponse response = connection.Ask("0\r\n\r\n");
  EXPECT_EQ(response.status, 200) << response.body.substr(0, 300);
  EXPECT_THAT(response.body, HasSubstr("\"data\":[0,0,"));
}

TEST_F(RestTest, AFramingErrorIsAnsweredOnce) {
  const std::string head = absl::StrCat("POST ", kInfer, " HTTP/1.1\r\nHost: localhost\r\n");
  for (const std::string& request :
       {head + "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        head + "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        head + "Content-Length: 3, 3\r\n\r\nabc",
        head + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        head + "Transfer-Encoding: chunked\r\n\r\nx\r\n",
        head + "Transfer-Encoding: chunked\r\n\r\n1\nx\r\n0\r\n\r\n",
        head + "Content-Length: 1\n\nx", head + "Content-Length : 1\r\n\r\nx",
        // A header of several lines.
        head + "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        head + "Transfer-Encoding: chunked,\r\n\tchunked\r\n\r\n0\r\n\r\n",
        head + "X: a\r\n b\r\nContent-Length: 1\r\n\r\nx",
        head + "\tX: a\r\nContent-Length: 1\r\n\r\nx",
        // A chunked body that lacks its last line, or one within: the next request is no trailer.
        head + "Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n",
        head + "Transfer-Encoding: chunked\r\n\r\n1\r\nx0\r\n\r\n",
        head + "Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n folded: x\r\n\r\n",
        // Beyond what any counter holds.
        head + "Content-Length: 18446744073709551615\r\n\r\nx",
        head + "Content-Length: 18446744073709551616\r\n\r\nx"}) {
    RawHttp connection(server_.http_address());
    connection.Send(request + RequestText("GET", "/v2/health/live"));
    EXPECT_EQ(connection.Read().status, 400) << request;
    connection.EndWriting();
    EXPECT_TRUE(connection.IsClosed()) << request;
  }
}

TEST_F(RestTest, ALengthThatIsTooLongIsToldAsItIs) {
  const auto ask = [&](const char* length) {
    return RawHttp(server_.http_address())
        .Ask(absl::StrCat("POST ", kInfer,
                          " HTTP/1.1\r\nHost: localhost\r\nContent-Length: ", length, "\r\n\r\n"));
  };
  const RawResponse most = ask("18446744073709551615");
  EXPECT_EQ(most.status, 400);
  EXPECT_THAT(most.body, HasSubstr("Content-Length is 18446744073709551615; it must be at most "
                                   "--max_message_bytes"));
  const RawResponse long_one = ask("576460752303423487");
  EXPECT_EQ(long_one.status, 413);
  EXPECT_THAT(long_one.body, HasSubstr("576460752303423487 bytes"));
}

TEST_F(RestTest, ATlsClientOfThisPortIsClosed) {
  RawHttp connection(server_.http_address());
  connection.Send(absl::string_view("\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00", 10));
  EXPECT_EQ(connection.Read().status, 400);
  connection.EndWriting();
  EXPECT_TRUE(connection.IsClosed());
}

TEST_F(RestTest, PipelinedRequestsAreAnsweredInOrderUntilGarbage) {
  RawHttp connection(server_.http_address());
  connection.Send(RequestText("POST", kInfer, Call("1")) + RequestText("GET", "/v2/health/live") +
                  RequestText("POST", kInfer, Call("2")) + "garbage\r\n\r\n" +
                  RequestText("GET", "/v2/health/live"));
  EXPECT_THAT(connection.Read().body, HasSubstr("\"data\":[1]"));
  EXPECT_EQ(connection.Read().body, R"({"live":true})");
  EXPECT_THAT(connection.Read().body, HasSubstr("\"data\":[2]"));
  EXPECT_EQ(connection.Read().status, 400);
  connection.EndWriting();
  EXPECT_TRUE(connection.IsClosed());
}

TEST_F(RestTest, ContinuesOnceMemoryIsReserved) {
  RawHttp connection(server_.http_address());
  const std::string request = RequestText("POST", kInfer, Call("5"), "Expect: 100-continue\r\n");
  const size_t body = request.find("\r\n\r\n") + 4;
  EXPECT_EQ(connection.Ask(request.substr(0, body)).status, 100);
  EXPECT_THAT(connection.Ask(request.substr(body)).body, HasSubstr("\"data\":[5]"));
  // Refused, the body is not sent.
  RawHttp other(server_.http_address());
  EXPECT_EQ(other
                .Ask(absl::StrCat("POST ", kInfer,
                                  " HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
                                  "Content-Length: 99999999999\r\n\r\n"))
                .status,
            413);
}

TEST_F(RestTest, AnswersPathsAndMethodsThatItLacks) {
  EXPECT_EQ(Get("/v3").status, 404);
  const RawResponse response = Get(kInfer);
  EXPECT_EQ(response.status, 405);
  EXPECT_EQ(response.Value("allow"), "POST");
  RawHttp connection(server_.http_address());
  connection.Send(RequestText("HEAD", "/v2"));
  const RawResponse head = connection.Read(/*has_body=*/false);
  EXPECT_EQ(head.status, 200);
  EXPECT_NE(head.Value("content-length"), "0");
  EXPECT_EQ(connection.Ask(RequestText("GET", "/v2/health/ready")).status, 200);
}

TEST_F(RestTest, AHostThatResolvesHereIsNoHostOfOurs) {
  const auto ask = [&](absl::string_view target, absl::string_view host) {
    return RawHttp(server_.http_address())
        .Ask(absl::StrCat("GET ", target, " HTTP/1.1\r\nHost: ", host, "\r\n\r\n"))
        .status;
  };
  for (const char* host : {"localhost", "LOCALHOST:1", "127.0.0.1:8000", "127.0.0.2", "[::1]:80"}) {
    EXPECT_EQ(ask("/v2", host), 200) << host;
  }
  for (const char* host : {"evil.example", "localhost.evil.example", "127.evil.example", ""}) {
    EXPECT_EQ(ask("/v2", host), 403) << host;
  }
  for (const char* host : {"::1", "127.0.0.1:99999999", "localhost:abc", "[::1", "local host"}) {
    EXPECT_EQ(ask("/v2", host), 400) << host;
    EXPECT_EQ(ask(absl::StrCat("http://localhost/v2"), host), 400) << host;
  }
  EXPECT_EQ(ask("http://localhost:99999999/v2", "localhost"), 400);
  EXPECT_EQ(ask("http://evil.example/v2", "localhost"), 403);
  EXPECT_EQ(ask("http://localhost:1/v2", "evil.example"), 200);
  EXPECT_EQ(ask("/v2", "localhost:80@evil.example"), 400);
  EXPECT_EQ(ask("http://localhost:80@evil.example/v2", "localhost"), 400);
}

// On all addresses, as in a container.
class PublicRestTest : public RestTest {
 protected:
  PublicRestTest()
      : RestTest({"--http_address=0.0.0.0:0", "--insecure", "--http_hosts=rapt,*.example.org",
                  "--kv_cache_bytes=4194304"}) {}
};

TEST_F(PublicRestTest, OnlyListedNamesAreOurs) {
  const std::string address =
      absl::StrCat("127.0.0.1", server_.http_address().substr(server_.http_address().rfind(':')));
  const auto ask = [&](absl::string_view path, absl::string_view host,
                       absl::string_view more = "") {
    return RawHttp(address).Ask(absl::StrCat("POST ", path, " HTTP/1.1\r\nHost: ", host, "\r\n",
                                             more, "Content-Length: 2\r\n\r\n{}"));
  };
  for (const char* host : {"rapt", "rapt:8000", "a.example.org", "localhost", "127.0.0.1",
                           "10.1.2.3", "[2001:db8::1]:80"}) {
    EXPECT_EQ(ask("/v2/repository/index", host).status, 200) << host;
  }
  // A page whose name was made to resolve here is of the same origin as its requests.
  for (const char* path :
       {"/v2/repository/index", "/v2/repository/models/attention/unload", "/rapt/v1/caches/list"}) {
    const RawResponse response =
        ask(path, "evil.example:8000", "Origin: http://evil.example:8000\r\n");
    EXPECT_EQ(response.status, 403) << path;
    EXPECT_THAT(response.body, HasSubstr("the host is 'evil.example'; it must be localhost, an IP "
                                         "address or a name that --http_hosts lists"));
  }
  EXPECT_EQ(RawHttp(server_.metrics_address())
                .Ask("GET /readyz HTTP/1.1\r\nHost: any.example\r\n\r\n")
                .status,
            200);
}

// --- The life of a call --------------------------------------------------------------------------

TEST_F(RestTest, LeavingStopsTheComputation) {
  {
    RawHttp connection(server_.http_address());
    ASSERT_TRUE(connection.Send(LongCall()));
    WaitUntilComputing(server_);
  }
  WaitForMetric(server_, "rapt_requests_total", 1,
                {{"method", "v2/ModelInfer"}, {"code", "CANCELLED"}});
  WaitUntilNothingIsHeld(server_);
}

TEST_F(RestTest, AHalfCloseCountsAsLeaving) {
  RawHttp connection(server_.http_address());
  ASSERT_TRUE(connection.Send(LongCall()));
  WaitUntilComputing(server_);
  connection.EndWriting();
  EXPECT_TRUE(connection.IsClosed());
  WaitUntilNothingIsHeld(server_);
}

TEST_F(RestTest, ADeadlineComesInAHeader) {
  EXPECT_EQ(RawHttp(server_.http_address())
                .Ask(RequestText("POST", kInfer, Call("1"), "Grpc-Timeout: 1\r\n"))
                .status,
            400);
  EXPECT_EQ(
      RawHttp(server_.http_address())
          .Ask(RequestText("POST", kInfer, Call("1"), "Grpc-Timeout: 9S\r\nGrpc-Timeout: 9S\r\n"))
          .status,
      400);
  std::string call = LongCall();
  call.replace(call.find("Content-Length"), 0, "Grpc-Timeout: 20m\r\n");
  EXPECT_EQ(RawHttp(server_.http_address()).Ask(call).status, 504);
  EXPECT_EQ(Infer(Call("1", "FP32", R"(,"parameters":{"timeout":1})")).status, 504);
}

TEST_F(RestTest, ATraceComesBackWithPlanAndTimes) {
  const RawResponse response =
      Infer(Call("1"), absl::StrCat("traceparent: ", kTraceparent, "\r\n"));
  EXPECT_EQ(response.Value("traceparent"), kTraceparent);
  EXPECT_NE(response.Value("rapt-backend"), "");
  EXPECT_NE(response.Value("rapt-total-us"), "");
}

TEST_F(RestTest, ASenderThatStopsIsEvicted) {
  RawHttp connection(server_.http_address());
  connection.Send(RequestText("POST", kInfer, Call("1")).substr(0, 200));
  const RawResponse response = connection.Read();
  EXPECT_EQ(response.status, 408) << response.body;
  EXPECT_EQ(response.Value("connection"), "close");
  RawHttp slow_head(server_.http_address());
  slow_head.Send("POST /v2");
  EXPECT_EQ(slow_head.Read().status, 408);
}

// A body is announced, begun and left.
TEST_F(RestTest, LeavingWithinABodyReleasesIt) {
  {
    RawHttp connection(server_.http_address());
    connection.Send(LongCall().substr(0, 3 << 20));
    WaitForMetric(server_, "rapt_open_calls", 1);
  }
  WaitForMetric(server_, "rapt_requests_total", 1,
                {{"method", "v2/ModelInfer"}, {"code", "CANCELLED"}});
  WaitUntilNothingIsHeld(server_);
}

// Before any of a body is read, all of it is reserved.
TEST_F(RestTest, ABodyIsReservedWhenItIsAnnounced) {
  RawHttp connection(server_.http_address());
  connection.Send(absl::StrCat("POST ", kInfer,
                               " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n"
                               "Inference-Header-Content-Length: 9\r\n\r\n"));
  WaitForPage(server_, "a reservation", [](const std::string& page) {
    return SumOnPage(page, "rapt_memory_reserved_bytes") >= 2'000'000;
  });
}

TEST(RestReaderTest, AReaderThatStopsIsEvictedAtTheDeadline) {
  const ServerProcess server({"--default_deadline=2s"});
  const int64_t tokens = 65536;  // 16 MiB of Y
  const std::string json = absl::StrCat(
      "{\"inputs\":[", BinaryInput("Q", tokens, tokens * 256), ",", BinaryInput("K", 1, 256), ",",
      BinaryInput("V", 1, 256), R"(],"parameters":{"binary_data_output":true}})");
  const std::string tensors(static_cast<size_t>(tokens + 2) * 256, '\0');
  RawHttp connection(server.http_address());
  connection.Send(RequestText("POST", kInfer, json + tensors, JsonLength(json)));
  WaitForMetric(server, "rapt_deadline_exceeded_total", 1, {{"phase", "send"}});
  WaitUntilNothingIsHeld(server);
}

TEST(RestAddressTest, ServesOnIpv6) {
  const ServerProcess server({"--http_address=[::1]:0"});
  const auto ask = [&server](absl::string_view host) {
    return RawHttp(server.http_address())
        .Ask(absl::StrCat("GET /v2/health/ready HTTP/1.1\r\nHost: ", host, "\r\n\r\n"))
        .status;
  };
  EXPECT_EQ(ask("[::1]"), 200);
  EXPECT_EQ(ask("evil.example"), 403);
}

class SmallRestTest : public RestTest {
 protected:
  SmallRestTest()
      : RestTest({"--memory_budget_bytes=67108864", "--max_message_bytes=2097152",
                  "--max_json_bytes=1000",
                  "--http_allow_origin=https://a.example,https://b.example",
                  "--max_calls_per_caller=2"}) {}
};

TEST_F(SmallRestTest, LimitsOfSize) {
  for (const auto& [bytes, status] : {std::pair(16384, 200), std::pair(16385, 413)}) {
    EXPECT_EQ(RawHttp(server_.http_address())
                  .Ask(RequestText("POST", "/v2/logging", "{}" + std::string(bytes - 2, ' ')))
                  .status,
              status);
  }
  EXPECT_EQ(Infer(std::string(1001, ' ')).status, 413);
  std::string json = BinaryInputs(64, 64 * 256);
  const RawResponse large = Infer(json + std::string(3 * 64 * 256, '\0'), JsonLength(json));
  EXPECT_EQ(large.status, 413);
  EXPECT_THAT(large.body, HasSubstr("ask for binary data"));
  json.replace(json.size() - 1, 1, R"(,"parameters":{"binary_data_output":true}})");
  EXPECT_EQ(Infer(json + std::string(3 * 64 * 256, '\0'), JsonLength(json)).status, 200);
  RawHttp connection(server_.http_address());
  connection.Send(absl::StrCat("POST ", kInfer, " HTTP/1.1\r\nHost: localhost\r\n",
                               "Transfer-Encoding: chunked\r\n\r\n300000\r\n"));
  connection.Send(std::string(3 << 20, 'x'));
  EXPECT_EQ(connection.Read().status, 413);
  for (const char* path : {kInfer, "/rapt/v1/attend"}) {
    const RawResponse chunked =
        RawHttp(server_.http_address())
            .Ask(absl::StrCat("POST ", path, " HTTP/1.1\r\nHost: localhost\r\n",
                              "Transfer-Encoding: chunked\r\n\r\n3e9\r\n", std::string(1001, ' '),
                              "\r\n0\r\n\r\n"));
    EXPECT_EQ(chunked.status, 413) << path;
    EXPECT_THAT(chunked.body, HasSubstr("the request has 1001 bytes of JSON")) << path;
  }
}

TEST_F(SmallRestTest, PagesOfAllowedOriginsMayRead) {
  const RawResponse response = Get("/v2", "Origin: https://b.example\r\n");
  EXPECT_EQ(response.Value("access-control-allow-origin"), "https://b.example");
  EXPECT_EQ(response.Value("vary"), "Origin");
  const std::string preflight = "Access-Control-Request-Method: POST\r\nOrigin: https://";
  const auto ask = [&](absl::string_view origin) {
    return RawHttp(server_.http_address())
        .Ask(RequestText("OPTIONS", kInfer, "", absl::StrCat(preflight, origin, "\r\n")));
  };
  EXPECT_EQ(ask("a.example").status, 204);
  EXPECT_THAT(ask("a.example").Value("access-control-allow-headers"), HasSubstr("authorization"));
  EXPECT_EQ(ask("c.example").status, 403);
}

// A browser sends a simple request of any page, such as a POST of text, without asking first.
TEST_F(SmallRestTest, PagesOfOtherOriginsMayNotSend) {
  const auto ask = [&](absl::string_view headers) {
    return RawHttp(server_.http_address()).Ask(RequestText("POST", "/v2/logging", "", headers));
  };
  for (const char* origin : {"https://c.example", "null", "", "localhost", "http://localhost:1",
                             "https://a.example.c.example", "file://localhost"}) {
    const RawResponse response = ask(absl::StrCat("Origin: ", origin, "\r\n"));
    EXPECT_EQ(response.status, 403) << origin;
    EXPECT_EQ(response.body, R"({"error":"the origin is not listed in --http_allow_origin"})");
    EXPECT_EQ(response.Value("access-control-allow-origin"), "") << origin;
  }
  EXPECT_EQ(ask("Origin: https://a.example\r\nOrigin: https://c.example\r\n").status, 403);
  for (const char* origin : {"https://a.example", "http://localhost", "https://LOCALHOST"}) {
    EXPECT_EQ(ask(absl::StrCat("Origin: ", origin, "\r\n")).status, 200) << origin;
  }
  // The address of the metrics has no calls.
  EXPECT_EQ(RawHttp(server_.metrics_address())
                .Ask(RequestText("GET", "/readyz", "", "Origin: https://c.example\r\n"))
                .status,
            200);
}

TEST_F(SmallRestTest, ACallerHasItsLimit) {
  RawHttp first(server_.http_address()), second(server_.http_address());
  for (const RawHttp* connection : {&first, &second}) {
    connection->Send(RequestText("POST", kInfer, Call("1")).substr(0, 200));
  }
  WaitForMetric(server_, "rapt_open_calls", 2);
  const RawResponse response = Infer(Call("1"));
  EXPECT_EQ(response.status, 429);
  EXPECT_EQ(response.Value("retry-after"), "1");
}

// Bodies that are announced and begun, but for which there is no memory.
TEST_F(SmallRestTest, MemoryStaysWithinTheBudget) {
  const int64_t before = RssAnonBytes(server_.pid());
  const MemoryWatch watch(server_.pid());
  std::vector<std::unique_ptr<RawHttp>> connections;
  for (int n = 0; n < 200; ++n) {
    const std::string from = absl::StrCat("127.0.0.", 2 + n);
    connections.push_back(std::make_unique<RawHttp>(server_.http_address(), from));
    connections.back()->Send(absl::StrCat("POST ", kInfer,
                                          " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000"
                                          "\r\nInference-Header-Content-Length: 9\r\n\r\n",
                                          std::string(100000, 'x')));
  }
  for (auto& connection : connections) {
    // 504: one that waited for memory on a slow machine, and then for its body.
    EXPECT_THAT(connection->Read().status, ::testing::AnyOf(408, 429, 504));
  }
  connections.clear();
  WaitUntilNothingIsHeld(server_);
  if (kRssIsMeaningful) {
    EXPECT_LT(watch.peak() - before, int64_t{96} << 20);
  }
}

// Calls whose answers have 5 MB of JSON, which nobody reads.
class RestMemoryTest : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr int64_t kRows = 2048;

  // A call of `columns` columns of V with numbers of 13 characters.
  static std::string InferText(int64_t columns) {
    std::string ones(static_cast<size_t>(kRows + 1 + columns) * 2, '\0');
    const std::string json = absl::StrCat(
        R"({"inputs":[{"name":"Q","shape":[1,1,)", kRows,
        R"(,1],"datatype":"FP16","parameters":{"binary_data_size":)", kRows * 2,
        R"(}},{"name":"K","shape":[1,1,1,1],"datatype":"FP16","parameters":{"binary_data_size":2}},)",
        R"({"name":"V","shape":[1,1,1,)", columns,
        R"(],"datatype":"FP16","parameters":{"binary_data_size":)", columns * 2, "}}]}");
    for (int64_t n = kRows + 1; n < kRows + 1 + columns; ++n) ones[2 * n] = '\x01';
    return RequestText("POST", kInfer, json + ones, JsonLength(json));
  }

  // A call of rapt.v1, whose numbers take no more in base64.
  static std::string AttendText(int64_t columns) {
    const auto tensor = [](int64_t rows, int64_t columns) {
      return absl::StrCat(R"({"dtype":"FP64","shape":[1,1,)", rows, ",", columns, R"(],"data":[)",
                          absl::StrJoin(std::vector<int>(rows * columns), ","), "]}");
    };
    return RequestText("POST", "/rapt/v1/attend",
                       absl::StrCat(R"({"q":)", tensor(kRows, 1), R"(,"k":)", tensor(1, 1),
                                    R"(,"v":)", tensor(1, columns), "}"));
  }

  // Query heads share a key head: their outputs alone are large.
  static std::string LinearText(int64_t columns) {
    const auto tensor = [](int64_t numbers) {
      return absl::StrCat(R"({"dtype":"FP64","shape":[1,1,)", numbers, R"(],"data":[)",
                          absl::StrJoin(std::vector<int>(numbers), ","), "]}");
    };
    return RequestText("POST", "/rapt/v1/linear-attend",
                       absl::StrCat(R"({"query":)", tensor(kRows), R"(,"key":)", tensor(1),
                                    R"(,"value":)", tensor(columns), R"(,"qNumHeads":)", kRows,
                                    R"(,"kvNumHeads":1,"updateRule":"UPDATE_LINEAR"})"));
  }

  std::string Text(int64_t columns) const {
    const absl::string_view method = GetParam();
    if (method == "v2/ModelInfer") return InferText(columns);
    return method == "rapt/v1/Attend" ? AttendText(columns) : LinearText(columns / 2);
  }
};
INSTANTIATE_TEST_SUITE_P(Methods, RestMemoryTest,
                         ::testing::Values("v2/ModelInfer", "rapt/v1/Attend",
                                           "rapt/v1/LinearAttend"));

TEST_P(RestMemoryTest, AnswersInJsonStayWithinTheBudget) {
  constexpr int64_t kBudget = int64_t{64} << 20;
  constexpr int kCallers = 60;
  const ServerProcess server({absl::StrCat("--memory_budget_bytes=", kBudget),
                              "--max_message_bytes=2097152", "--max_queue_delay=2s"});
  const std::string text = Text(256);
  const int64_t before = RssAnonBytes(server.pid());
  const MemoryWatch watch(server.pid());
  std::vector<std::unique_ptr<RawHttp>> connections;
  for (int n = 0; n < kCallers; ++n) {
    const std::string from = absl::StrCat("127.0.0.", 2 + n);
    connections.push_back(std::make_unique<RawHttp>(server.http_address(), from));
    connections.back()->Send(text);
  }
  WaitForPage(server, "answers that nobody reads", [&](const std::string& page) {
    EXPECT_LE(SumOnPage(page, "rapt_memory_reserved_bytes"), kBudget);
    return SumOnPage(page, "rapt_requests_total", {{"method", GetParam()}}) > 0;
  });
  for (auto& connection : connections) {
    EXPECT_THAT(connection->Read().status, ::testing::AnyOf(0, 200, 429));
  }
  connections.clear();
  WaitUntilNothingIsHeld(server);
  if (kRssIsMeaningful) {
    EXPECT_LT(watch.peak() - before, kBudget + (int64_t{32} << 20));
  }
}

// No header names a plan.
TEST_P(RestMemoryTest, AnAnswerThatIsTooLargeIsRefusedBeforeItIsComputed) {
  const ServerProcess server;
  const RawResponse response = RawHttp(server.http_address()).Ask(Text(4096));
  EXPECT_EQ(response.status, 413);
  EXPECT_THAT(response.body, HasSubstr("--max_json_bytes allows 8388608"));
  EXPECT_EQ(response.Value("rapt-plan"), "");
}

TEST(RestDrainTest, RefusesAndClosesWhileItDrains) {
  ServerProcess server({"--drain_pause=100ms", "--drain_refusal_time=1s"});
  const auto ask = [&server](const std::string& request) {
    return RawHttp(server.http_address()).Ask(request);
  };
  EXPECT_EQ(ask(RequestText("GET", "/v2/health/ready")).Value("connection"), "");
  server.Terminate();
  while (ask(RequestText("GET", "/v2/health/ready")).status == 200) {
  }
  RawResponse refusal;
  do {
    refusal = ask(RequestText("POST", kInfer, Call("1")));
    EXPECT_EQ(refusal.Value("connection"), "close");
  } while (refusal.status == 200);
  EXPECT_EQ(refusal.status, 503);
  EXPECT_EQ(server.Wait(), 0);
}

}  // namespace
}  // namespace rapt::test
