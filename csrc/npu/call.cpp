#include "call.h"

namespace fasttps::npu {

void call(Design& design, const Program& program, std::span<Buffer* const> arguments,
          std::span<const int64_t> scalars) {
  if (arguments.size() != program.arguments.size()) {
    throw std::invalid_argument(program.name + ": wanted " +
                                std::to_string(program.arguments.size()) + " buffers, got " +
                                std::to_string(arguments.size()));
  }
  const auto sync = [&](Access access, const char* direction, auto how) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      const Argument& argument = program.arguments[i];
      if (argument.access != access) continue;
      (arguments[i]->*how)(0, argument.bytes, program.name + "." + argument.name + direction);
    }
  };
  sync(Access::kIn, ".to_device", &Buffer::sync_to_device);
  design.run(arguments, scalars);
  sync(Access::kOut, ".from_device", &Buffer::sync_from_device);
}

}  // namespace fasttps::npu
