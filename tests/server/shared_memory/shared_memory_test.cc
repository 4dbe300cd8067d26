#include "server/shared_memory/shared_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/bus_error_guard.h"
#include "base/thread_pool.h"
#include "server/shared_memory/region.h"
#include "tests/support/fake_device_memory.h"
#include "tests/support/shared_object.h"

namespace rapt {
namespace {

using test::SharedObject;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using Kind = SharedMemory::Kind;

constexpr int64_t kPage = 4096;

SharedMemory::Options Allowed() { return {.allowed = true, .key_prefix = "rapt", .open_cuda = {}}; }

// --- Registration --------------------------------------------------------------------------------

TEST(SharedMemoryTest, FindsTheBytesThatItsOwnerWrote) {
  const SharedObject object(3 * kPage);
  SharedMemory memory(Allowed());
  // Neither begins at a page boundary.
  ASSERT_TRUE(memory.RegisterSystem("r", object.key(), 100, 2 * kPage).ok());
  std::strcpy(reinterpret_cast<char*>(object.data()) + 100 + kPage, "here");
  const absl::StatusOr<SharedBytes> found = memory.Find({"r", kPage, 5});
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_STREQ(reinterpret_cast<const char*>(found->bytes.data()), "here");
  EXPECT_EQ(found->bytes.size(), 5u);
  std::memcpy(found->bytes.data(), "seen", 5);
  EXPECT_STREQ(reinterpret_cast<const char*>(object.data()) + 100 + kPage, "seen");
}

TEST(SharedMemoryTest, InterpretsKeysLikeShmOpen) {
  const SharedObject object(kPage);
  SharedMemory memory(Allowed());
  EXPECT_TRUE(memory.RegisterSystem("bare", object.key().substr(1), 0, kPage).ok());
  EXPECT_TRUE(memory.RegisterSystem("slashes", absl::StrCat("/", object.key()), 0, kPage).ok());
}

TEST(SharedMemoryTest, BytesStayMappedWhileTheyAreHeld) {
  const SharedObject object(kPage);
  SharedMemory memory(Allowed());
  ASSERT_TRUE(memory.RegisterSystem("r", object.key(), 0, kPage).ok());
  const absl::StatusOr<SharedBytes> found = memory.Find({"r", 0, kPage});
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_TRUE(memory.Unregister(Kind::kSystem, "r").ok());
  object.data()[7] = std::byte{42};
  EXPECT_EQ(found->bytes[7], std::byte{42});
  EXPECT_EQ(memory.Find({"r", 0, 1}).status().code(), absl::StatusCode::kNotFound);
}

TEST(SharedMemoryTest, UnregistersOneOrAll) {
  const SharedObject object(kPage);
  SharedMemory memory(Allowed());
  for (const char* name : {"a", "b", "c"}) {
    ASSERT_TRUE(memory.RegisterSystem(name, object.key(), 0, kPage).ok());
  }
  EXPECT_TRUE(memory.Unregister(Kind::kSystem, "b").ok());
  EXPECT_TRUE(memory.Unregister(Kind::kSystem, "b").ok())
      << "unregistering an unknown region succeeds, as in Triton";
  EXPECT_EQ(memory.Describe(Kind::kSystem, "")->size(), 2u);
  EXPECT_TRUE(memory.Unregister(Kind::kCuda, "").ok()) << "the others stay";
  EXPECT_EQ(memory.Describe(Kind::kSystem, "a")->at(0).byte_size, kPage);
  EXPECT_TRUE(memory.Unregister(Kind::kSystem, "").ok());
  EXPECT_THAT(*memory.Describe(Kind::kSystem, ""), IsEmpty());
  EXPECT_EQ(memory.Describe(Kind::kSystem, "a").status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(memory.RegisterSystem("a", object.key(), 0, kPage).ok()) << "the name is free again";
}

TEST(SharedMemoryTest, NamesAreUnique) {
  const SharedObject object(kPage);
  SharedMemory memory(Allowed());
  ASSERT_TRUE(memory.RegisterSystem("r", object.key(), 0, kPage).ok());
  EXPECT_EQ(memory.RegisterSystem("r", object.key(), 0, kPage).code(),
            absl::StatusCode::kAlreadyExists);
}

struct RefusedRegion {
  const char* name;
  std::string key;  // "": the key of an object of two pages
  uint64_t offset;
  uint64_t byte_size;
  absl::StatusCode code;
  const char* message;
};

constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
constexpr uint64_t kLargest = std::numeric_limits<int64_t>::max();
constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

const RefusedRegion kRefusedRegions[] = {
    {"BeyondTheEnd", "", 1, 2 * kPage, kInvalid, "8192"},
    {"EndThatOverflows", "", kLargest, kLargest, kInvalid, "exceed the shared memory object"},
    {"OffsetOf64Bits", "", kHuge, 1, kInvalid, "offset"},
    {"SizeOf64Bits", "", 0, kHuge, kInvalid, "byte_size"},
    {"Nothing", "", 0, 0, kInvalid, "byte_size is 0"},
    {"NoSuchObject", "rapt-is-not-there", 0, 1, absl::StatusCode::kNotFound,
     "no shared memory object"},
    {"OtherPrefix", "/secret", 0, 1, kInvalid, "'rapt'"},
    {"NoKey", "//", 0, 1, kInvalid, "slash"},
    {"Path", "rapt/../../etc/passwd", 0, 1, kInvalid, "slash"},
    {"NulInTheKey", std::string("rapt\0secret", 11), 0, 1, kInvalid, "slash"},
};

class RefusedRegionTest : public ::testing::TestWithParam<RefusedRegion> {};

TEST_P(RefusedRegionTest, ReportsTheReasonButNotTheKey) {
  const RefusedRegion& p = GetParam();
  const SharedObject object(2 * kPage);
  SharedMemory memory(Allowed());
  const std::string key = p.key.empty() ? object.key() : p.key;
  const absl::Status status = memory.RegisterSystem("mine", key, p.offset, p.byte_size);
  EXPECT_EQ(status.code(), p.code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("'mine'"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(p.message));
  for (const char* secret : {"secret", "passwd", "is-not-there", object.key().c_str() + 1}) {
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr(secret)));
  }
  EXPECT_THAT(*memory.Describe(Kind::kSystem, ""), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(All, RefusedRegionTest, ::testing::ValuesIn(kRefusedRegions),
                         [](const auto& info) { return info.param.name; });

TEST(SharedMemoryTest, PartsMustLieWithinTheirRegion) {
  const SharedObject object(2 * kPage);
  SharedMemory memory(Allowed());
  ASSERT_TRUE(memory.RegisterSystem("r", object.key(), 0, kPage).ok());
  const int64_t most = std::numeric_limits<int64_t>::max();
  const std::pair<int64_t, int64_t> parts[] = {{0, kPage + 1}, {kPage, 1},   {-1, 1},
                                               {1, -1},        {most, most}, {1, most}};
  for (const auto& [offset, byte_size] : parts) {
    const absl::Status status = memory.Find({"r", offset, byte_size}).status();
    EXPECT_EQ(status.code(), kInvalid) << offset << ", " << byte_size;
    EXPECT_THAT(std::string(status.message()), HasSubstr("4096"));
  }
  EXPECT_TRUE(memory.Find({"r", kPage, 0}).ok());
}

TEST(SharedMemoryTest, IsOffUnlessAllowed) {
  const SharedObject object(kPage);
  SharedMemory memory({});
  const absl::Status statuses[] = {
      memory.RegisterSystem("r", object.key(), 0, kPage),
      memory.RegisterCuda("r", "handle", 0, kPage), memory.Unregister(Kind::kSystem, ""),
      memory.Describe(Kind::kSystem, "").status(), memory.Find({"r", 0, 1}).status()};
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  }
}

TEST(SharedMemoryTest, BoundsTheNumberOfRegions) {
  const SharedObject object(kPage);
  SharedMemory memory(Allowed());
  absl::Status status;
  int registered = 0;
  for (; registered <= BusErrorGuard::kMaxGuards; ++registered) {
    status = memory.RegisterSystem(absl::StrCat("r", registered), object.key(), 0, kPage);
    if (!status.ok()) break;
  }
  EXPECT_EQ(registered, BusErrorGuard::kMaxGuards);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  ASSERT_TRUE(memory.Unregister(Kind::kSystem, "r3").ok());
  EXPECT_TRUE(memory.RegisterSystem("again", object.key(), 0, kPage).ok());
}

// --- Devices -------------------------------------------------------------------------------------

TEST(SharedMemoryTest, ABackendMayOpenCudaMemory) {
  const auto device = std::make_shared<test::FakeDeviceMemory>(64);
  SharedMemory::Options options = Allowed();
  options.open_cuda =
      [&](absl::string_view raw_handle, int64_t device_id,
          int64_t byte_size) -> absl::StatusOr<std::shared_ptr<const DeviceMemory>> {
    EXPECT_EQ(raw_handle, "handle");
    EXPECT_EQ(byte_size, 64);
    if (device_id != 3) return absl::InvalidArgumentError("not this device");
    return device;
  };
  SharedMemory memory(options);
  EXPECT_TRUE(memory.takes_cuda());
  ASSERT_TRUE(memory.RegisterCuda("d", "handle", 3, 64).ok());
  EXPECT_EQ(memory.Describe(Kind::kCuda, "d")->at(0).device_id, 3);
  EXPECT_EQ(memory.Describe(Kind::kSystem, "d").status().code(), absl::StatusCode::kNotFound);
  const absl::StatusOr<SharedBytes> found = memory.Find({"d", 16, 48});
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->device.memory, device.get());
  EXPECT_EQ(found->device.offset, 16);
  EXPECT_EQ(memory.Find({"d", 16, 49}).status().code(), kInvalid);
  EXPECT_EQ(memory.RegisterSystem("d", "rapt", 0, 1).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(memory.RegisterCuda("e", "handle", 0, 64),
            absl::InvalidArgumentError("region 'e': not this device"));
  EXPECT_TRUE(memory.Unregister(Kind::kCuda, "").ok());
  EXPECT_EQ(memory.Find({"d", 0, 1}).status().code(), absl::StatusCode::kNotFound);
}

TEST(SharedMemoryTest, BoundsTheRegionsOfDevicesToo) {
  SharedMemory::Options options = Allowed();
  options.open_cuda = [](absl::string_view, int64_t,
                         int64_t) -> absl::StatusOr<std::shared_ptr<const DeviceMemory>> {
    return std::make_shared<test::FakeDeviceMemory>(64);
  };
  SharedMemory memory(options);
  const auto add = [&](size_t n) { return memory.RegisterCuda(absl::StrCat(n), "handle", 0, 64); };
  for (size_t n = 0; n < SharedMemory::kMaxRegions; ++n) ASSERT_TRUE(add(n).ok()) << n;
  const absl::Status status = add(SharedMemory::kMaxRegions);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("1024 regions are registered"));
  ASSERT_TRUE(memory.Unregister(Kind::kCuda, "0").ok());
  EXPECT_TRUE(add(SharedMemory::kMaxRegions).ok());
}

TEST(SharedMemoryTest, WithoutACudaBackendRegistrationIsUnimplementedButUnregisteringWorks) {
  SharedMemory memory(Allowed());
  EXPECT_FALSE(memory.takes_cuda());
  EXPECT_EQ(memory.RegisterCuda("d", "handle", 0, 64).code(), absl::StatusCode::kUnimplemented);
  EXPECT_TRUE(memory.Unregister(Kind::kCuda, "").ok());
  EXPECT_THAT(*memory.Describe(Kind::kCuda, ""), IsEmpty());
}

// --- Truncated memory ----------------------------------------------------------------------------

std::shared_ptr<const Region> Open(const SharedObject& object) {
  const auto region = OpenSystemRegion(object.key(), 0, object.size());
  EXPECT_TRUE(region.ok()) << region.status();
  return *region;
}

TEST(BusErrorGuardTest, ReadsZerosFromTruncatedMemory) {
  SharedObject object(8 * kPage);
  std::fill_n(object.data(), object.size(), std::byte{1});
  const std::shared_ptr<const Region> region = Open(object);
  EXPECT_TRUE(region->intact());
  object.Truncate(kPage);
  const absl::Span<std::byte> bytes = region->bytes();
  EXPECT_EQ(bytes[0], std::byte{1}) << "not truncated";
  EXPECT_TRUE(region->intact()) << "truncated memory was not accessed yet";
  EXPECT_EQ(bytes[5 * kPage], std::byte{0});
  EXPECT_FALSE(region->intact());
  EXPECT_EQ(bytes[0], std::byte{0}) << "the whole range was replaced";
}

TEST(BusErrorGuardTest, WritesToTruncatedMemoryAreDiscarded) {
  SharedObject object(8 * kPage);
  const std::shared_ptr<const Region> region = Open(object);
  object.Truncate(0);
  std::fill_n(region->bytes().data(), object.size(), std::byte{7});
  EXPECT_FALSE(region->intact());
}

TEST(BusErrorGuardTest, BreaksOnlyTheTruncatedRegion) {
  SharedObject cut(kPage), whole(kPage);
  const std::shared_ptr<const Region> regions[] = {Open(whole), Open(cut), Open(whole)};
  cut.Truncate(0);
  for (const auto& region : regions) region->bytes()[0] = std::byte{1};
  EXPECT_TRUE(regions[0]->intact());
  EXPECT_FALSE(regions[1]->intact());
  EXPECT_TRUE(regions[2]->intact());
}

TEST(BusErrorGuardTest, ManyThreadsMayAccessTruncatedMemoryAtOnce) {
  ThreadPool threads(4);
  for (int round = 0; round < 50; ++round) {
    SharedObject object(64 * kPage);
    const std::shared_ptr<const Region> region = Open(object);
    object.Truncate(0);
    threads.ParallelFor(64, [&](int64_t page, int) {
      region->bytes()[static_cast<size_t>(page * kPage)] = std::byte{1};
    });
    ASSERT_FALSE(region->intact()) << "round " << round;
  }
}

TEST(BusErrorGuardTest, OtherGuardsMayBeCreatedAndDestroyedMeanwhile) {
  const SharedObject other(kPage);
  std::atomic<bool> stopping{false};
  std::thread changes([&] {
    while (!stopping) Open(other)->bytes()[0] = std::byte{1};
  });
  for (int round = 0; round < 200; ++round) {
    SharedObject object(kPage);
    const std::shared_ptr<const Region> region = Open(object);
    object.Truncate(0);
    region->bytes()[0] = std::byte{1};
    EXPECT_FALSE(region->intact()) << "round " << round;
  }
  stopping = true;
  changes.join();
}

TEST(SharedMemoryTest, ABrokenRegionIsRejectedUntilRegisteredAgain) {
  SharedObject object(2 * kPage);
  SharedMemory memory(Allowed());
  ASSERT_TRUE(memory.RegisterSystem("r", object.key(), 0, 2 * kPage).ok());
  object.Truncate(0);
  memory.Find({"r", 0, 1})->bytes[0] = std::byte{1};
  object.Truncate(2 * kPage);
  EXPECT_THAT(std::string(memory.Find({"r", 0, 1}).status().message()), HasSubstr("truncated"));
  ASSERT_TRUE(memory.Unregister(Kind::kSystem, "r").ok());
  ASSERT_TRUE(memory.RegisterSystem("r", object.key(), 0, 2 * kPage).ok());
  EXPECT_TRUE(memory.Find({"r", 0, 1}).ok());
}

// As before: the signal, or a sanitizer's handler, terminates the process.
TEST(BusErrorGuardDeathTest, ABusErrorElsewhereStillTerminatesTheProcess) {
  SharedObject guarded(kPage), elsewhere(kPage);
  EXPECT_DEATH(
      {
        const std::shared_ptr<const Region> region = Open(guarded);
        elsewhere.Truncate(0);
        elsewhere.data()[0] = std::byte{1};
      },
      "");
}

TEST(BusErrorGuardDeathTest, ASentBusErrorStillTerminatesTheProcess) {
  SharedObject guarded(kPage);
  EXPECT_DEATH(
      {
        const std::shared_ptr<const Region> region = Open(guarded);
        kill(getpid(), SIGBUS);
        pause();
      },
      "");
}

}  // namespace
}  // namespace rapt
