#include "tests/support/run_attention.h"

namespace rapt::test {

const BackendSet& TargetBackends() { return BuiltInBackends(); }

}  // namespace rapt::test
