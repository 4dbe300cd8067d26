// Runs the AMX kernels on machines without AMX. Link it into a test binary in place of
// cpu/machine.cc; the binary then offers only AMX and the portable set. The shipped object code
// runs: tile instructions raise SIGILL on such a machine, and the signal handler emulates them
// according to Intel's manual. On a machine with AMX nothing traps.
//
// Stricter than the manual: rejects any configuration other than eight full tiles, and any use of
// tiles without a configuration.
#include <asm/prctl.h>
#include <immintrin.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "attention/cpu/machine.h"

namespace rapt::test {
namespace {

constexpr int kRows = 16;
constexpr int kRowBytes = 64;
constexpr int kTiles = 8;

using Tile = std::array<std::array<uint8_t, kRowBytes>, kRows>;

struct TileUnit {
  bool configured = false;
  std::array<Tile, kTiles> tiles;
};

thread_local TileUnit unit;

void Fail(const char* what) {
  std::fprintf(stderr, "AMX emulator: %s\n", what);
  std::abort();
}

// ---- Instructions

void LoadConfiguration(const uint8_t* p) {
  std::array<uint8_t, 64> want = {};
  want[0] = 1;  // palette
  for (int tile = 0; tile < kTiles; ++tile) {
    want[16 + 2 * tile] = kRowBytes;
    want[48 + tile] = kRows;
  }
  if (std::memcmp(p, want.data(), want.size()) != 0) Fail("not the configuration of whole tiles");
  unit = {};
  unit.configured = true;
}

// Subnormals are zero, going in and coming out; rounding is to nearest even.
class FlushSubnormals {
 public:
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80 | 0x8000 | 0x0040); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
};

// TDPBF16PS of the Software Developer's Manual: the products of even and of odd elements are summed
// separately, each by a chain of FMAs; then both sums are added to the tile.
__attribute__((target("avx512f"))) void MultiplyTiles(Tile& c, const Tile& a, const Tile& b) {
  const FlushSubnormals flush;
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  for (int m = 0; m < kRows; ++m) {
    __m512 even = _mm512_setzero_ps();
    __m512 odd = _mm512_setzero_ps();
    for (int k = 0; k < kRows; ++k) {
      uint32_t pair;
      std::memcpy(&pair, &a[m][4 * k], 4);
      const __m512i pairs = _mm512_loadu_si512(b[k].data());
      const __m512i a_even = _mm512_set1_epi32(static_cast<int>(pair << 16));
      const __m512i a_odd = _mm512_set1_epi32(static_cast<int>(pair & 0xFFFF0000));
      even = _mm512_fmadd_ps(_mm512_castsi512_ps(a_even),
                             // The form without a mask draws a false warning from g++ 12.
                             _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xFFFF, pairs, 16)), even);
      odd = _mm512_fmadd_ps(_mm512_castsi512_ps(a_odd),
                            _mm512_castsi512_ps(_mm512_and_si512(pairs, upper)), odd);
    }
    const __m512 sum = _mm512_add_ps(even, odd);
    _mm512_storeu_ps(c[m].data(), _mm512_add_ps(_mm512_loadu_ps(c[m].data()), sum));
  }
}

// ---- Decoding

// One instruction with a three-byte VEX prefix of the map 0F 38.
class Instruction {
 public:
  Instruction(const uint8_t* code, const greg_t* registers) : code_(code), registers_(registers) {}

  // Returns false if it is not a tile instruction.
  bool Execute() {
    if (code_[0] != 0xC4 || (code_[1] & 0x1F) != 2 || (code_[2] & 0x84) != 0) return false;
    const int prefix = code_[2] & 3;  // none, 66, F3, F2
    switch (code_[3] << 4 | prefix) {
      case 0x490:
        return InMemory() ? (LoadConfiguration(Address()), true) : Release();
      case 0x493:
        return Use(Reg()) && (Target(Reg()) = {}, true);
      case 0x4B3:
        return Use(Reg()) && Rows([&](uint8_t* row, int n) {
                 std::memcpy(Target(Reg())[n].data(), row, kRowBytes);
               });
      case 0x4B2:
        return Use(Reg()) && Rows([&](uint8_t* row, int n) {
                 std::memcpy(row, Target(Reg())[n].data(), kRowBytes);
               });
      case 0x5C2:
        return Multiply();
      default:
        return false;
    }
  }

  // REQUIRES: Execute() has returned true.
  int bytes() const { return InMemory() ? address_end_ : 5; }

 private:
  bool InMemory() const { return code_[4] >> 6 != 3; }
  int Reg() const { return code_[4] >> 3 & 7; }

  static bool Use(int) {
    if (!unit.configured) Fail("tiles are used without a configuration");
    return true;
  }
  static Tile& Target(int tile) { return unit.tiles[tile]; }

  static bool Release() {
    unit.configured = false;
    return true;
  }

  bool Multiply() {
    const int c = Reg();
    const int a = code_[4] & 7;
    const int b = ~(code_[2] >> 3) & 15;
    if (c == a || c == b || a == b) Fail("the three tiles of a product must differ");
    Use(c);
    MultiplyTiles(Target(c), Target(a), Target(b));
    return true;
  }

  template <typename Body>
  bool Rows(Body body) {
    uint8_t* row = Address();
    for (int n = 0; n < kRows; ++n, row += stride_) body(row, n);
    return true;
  }

  int64_t Register(int number) const {
    constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                              REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                              REG_R12, REG_R13, REG_R14, REG_R15};
    return registers_[kOrder[number]];
  }

  // The memory operand; the index register is the stride of tile rows.
  uint8_t* Address() {
    const int mod = code_[4] >> 6;
    int base = code_[4] & 7;
    int next = 5;
    int64_t address = 0;
    const bool base_extended = (code_[1] & 0x20) == 0;
    const bool has_sib = base == 4;
    if (has_sib) {
      const uint8_t sib = code_[next++];
      const int index = (sib >> 3 & 7) | ((code_[1] & 0x40) == 0 ? 8 : 0);
      if (index != 4) stride_ = Register(index) << (sib >> 6);
      base = sib & 7;
    }
    const bool no_base = mod == 0 && base == 5;
    if (!no_base) address = Register(base | (base_extended ? 8 : 0));
    if (mod == 1) {
      address += static_cast<int8_t>(code_[next++]);
    } else if (mod == 2 || no_base) {
      int32_t displacement;
      std::memcpy(&displacement, code_ + next, 4);
      next += 4;
      address += displacement;
      if (no_base && !has_sib) address += reinterpret_cast<int64_t>(code_ + next);
    }
    address_end_ = next;
    return reinterpret_cast<uint8_t*>(address);
  }

  const uint8_t* code_;
  const greg_t* registers_;
  int64_t stride_ = 0;
  int address_end_ = 0;
};

void OnIllegalInstruction(int, siginfo_t*, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const greg_t raised_at = registers[REG_RIP];
  // A signal costs more than most instructions, so directly following tile instructions are
  // emulated in the same handler.
  while (true) {
    Instruction instruction(reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers);
    if (!instruction.Execute()) break;
    registers[REG_RIP] += instruction.bytes();
  }
  if (registers[REG_RIP] == raised_at) signal(SIGILL, SIG_DFL);  // It is raised again.
}

bool Emulate() {
  struct sigaction action = {};
  action.sa_sigaction = OnIllegalInstruction;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  return sigaction(SIGILL, &action, nullptr) == 0;
}

}  // namespace
}  // namespace rapt::test

namespace rapt::cpu {

bool HasX8664V3() { return false; }
bool HasX8664V4() { return false; }
bool HasFastAvx512Bf16() { return false; }

bool HasAmxBf16() {
  constexpr int kTileData = 18;
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, kTileData) == 0) return true;
  // Other instructions are not emulated.
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         test::Emulate();
}

}  // namespace rapt::cpu
