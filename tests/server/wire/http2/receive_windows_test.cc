#include "server/wire/http2/receive_windows.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace rapt {
namespace {

constexpr int64_t kStep = 512 * 1024;
constexpr int64_t kConnection = 1 << 20;

TEST(ReceiveWindowsTest, OpensAStreamInStepsForWhatIsExpected) {
  ReceiveWindows windows;
  ReceiveWindows::Stream stream;
  stream.expected = 100;
  EXPECT_EQ(windows.Grant(stream, ReceiveWindows::kInitial), 0);  // the first window is enough
  stream.expected = 10 * kStep;
  EXPECT_EQ(windows.Grant(stream, 1000), kStep - 1000);
  EXPECT_EQ(windows.Grant(stream, kStep / 2 + 1), 0);  // not yet worth a frame
  EXPECT_EQ(windows.Grant(stream, kStep / 2), kStep / 2);
  stream.expected = 10;
  EXPECT_EQ(windows.Grant(stream, 3), 7);
}

TEST(ReceiveWindowsTest, AdmittedBytesComeOnTopOfTheConnectionsWindow) {
  ReceiveWindows windows;
  EXPECT_EQ(windows.TopUp(kConnection), 0);
  EXPECT_EQ(windows.TopUp(kConnection / 2 + 1), kConnection / 2 - 1);
  ReceiveWindows::Stream stream;
  stream.expected = kStep;
  windows.Grant(stream, 0);
  EXPECT_EQ(windows.TopUp(kConnection), kStep);
  windows.Remove(stream);
  EXPECT_EQ(windows.TopUp(kConnection), 0);
}

TEST(ReceiveWindowsTest, BytesThatAreNotAdmittedLeaveTheWindowOfOneStream) {
  ReceiveWindows windows;
  ReceiveWindows::Stream stream;
  windows.SetUnadmitted(stream, kConnection - 2 * ReceiveWindows::kInitial);
  EXPECT_EQ(windows.TopUp(0), 2 * ReceiveWindows::kInitial);
  windows.SetUnadmitted(stream, 2 * kConnection);
  EXPECT_EQ(windows.TopUp(0), ReceiveWindows::kInitial);
  windows.SetUnadmitted(stream, 0);
  EXPECT_EQ(windows.TopUp(0), kConnection);
}

}  // namespace
}  // namespace rapt
