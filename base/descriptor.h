#ifndef RAPT_BASE_DESCRIPTOR_H_
#define RAPT_BASE_DESCRIPTOR_H_

#include <unistd.h>

#include <utility>

namespace rapt {

// An owned file descriptor, closed on destruction. -1 means none.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }

  int get() const { return number_; }
  int Release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

}  // namespace rapt

#endif  // RAPT_BASE_DESCRIPTOR_H_
