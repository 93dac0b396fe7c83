#pragma once
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "expression.h"

// What an array of tiles is told to do: a design, which is loaded once, and the sequence of moves
// that each call runs. Nothing here knows the values of a tensor.
//
// Levels: L3 is DRAM, which host and array share; L2 the memory of mem tiles; L1 that of cores.
// Numbers of tiles are mlir-aie's: row 0 the shims, row 1 the mem tiles, rows 2 and up the cores.
namespace fasttps::npu {

struct Tile {
  int column = 0;
  int row = 0;

  friend auto operator<=>(const Tile&, const Tile&) = default;
};

// One dimension of a walk through memory: `size` steps of `stride` elements.
struct Dimension {
  Expression size;
  Expression stride;
};
// Outermost first; up to 4. Empty: all elements in order.
using Walk = std::vector<Dimension>;

// ---- L3 -----------------------------------------------------------------------------------------

enum class Access { kIn, kOut, kInOut };

// A buffer in L3 that a call is given.
struct Argument {
  std::string name = {};
  int64_t bytes = 0;
  Access access = Access::kIn;
};

// ---- FIFOs: how tiles talk ----------------------------------------------------------------------

// Where a FIFO begins or ends.
//   depth  elements in the tile's memory: 2 let the tile work on one while the other is moved.
//          At a shim there is no memory: 0.
//   walk   order in which the DMA of this end goes through an element, in units of unit_bytes; a
//          constant one. The stream in between is in order.
struct End {
  Tile tile = {};
  int depth = 2;
  Walk walk = {};
};

// Elements of one size from a tile to one other, or to several at once (broadcast: an element is
// sent when every consumer has room for it). Between neighbours that share memory, and where no
// end has a walk, no DMA is needed: `shared` says that none is used and that the elements lie in
// the producer's memory.
struct Fifo {
  std::string name = {};
  int64_t element_bytes = 0;
  int64_t unit_bytes = 4;  // of walks
  End producer = {};
  std::vector<End> consumers = {};
  bool shared = false;
};

// At a mem tile, FIFOs that end there go on as FIFOs that begin there, in the same memory.
//   one to one     forward
//   one to many    distribute: output i has the bytes of an element from offsets_bytes[i] on
//   many to one    join: input i fills the bytes of an element from offsets_bytes[i] on
// `repeat`: how often each element is sent on before it is freed.
struct Link {
  Tile tile = {};
  std::vector<int> inputs = {};   // of fifos
  std::vector<int> outputs = {};  // of fifos
  std::vector<int64_t> offsets_bytes = {};
  Expression repeat = 1;
};

// ---- cores --------------------------------------------------------------------------------------

// Memory of a core that stays: an accumulator, the statistics of a softmax.
struct Scratch {
  std::string name = {};
  int64_t bytes = 0;
};

enum class Port { kProduce, kConsume };

// What a kernel is given: the memory of elements that are held, scratch, or a number.
struct Held {
  int acquired = 0;  // of those that the body's statements have acquired; see Acquire
  Expression offset_bytes = 0;
};
struct OfScratch {
  int scratch = 0;
  Expression offset_bytes = 0;
};
using KernelArgument = std::variant<Held, OfScratch, Expression>;

struct Statement;
using Body = std::vector<Statement>;

// Hold `count` elements of a FIFO: full ones to read or free ones to write. The first is named
// `acquired`, the next acquired + 1, and so on.
struct Acquire {
  int fifo = 0;
  Port port = Port::kConsume;
  int count = 1;
  int acquired = 0;
};
// The oldest `count` of those that are held: to the producer as free, to the consumer as full.
struct Release {
  int fifo = 0;
  Port port = Port::kConsume;
  int count = 1;
};
// A tile kernel of kernel_list.h.
struct Call {
  std::string kernel = {};
  std::vector<KernelArgument> arguments = {};
};
struct Loop {
  int index = 0;  // what expressions of the body call it
  Expression count = {};
  Body body;
};
// The body where `condition` is not 0.
struct If {
  Expression condition = {};
  Body body;
};
struct Statement {
  std::variant<Acquire, Release, Call, Loop, If> what;
};

// What a core runs at every call, once, from its beginning.
struct Core {
  Tile tile = {};
  int64_t stack_bytes = 1024;
  std::vector<Scratch> scratch = {};
  Body body = {};
};

// ---- the sequence -------------------------------------------------------------------------------

// Between an argument and the shim's end of a FIFO: from L3 into one that begins there, into L3
// from one that ends there. The channel works through its moves in order, and the FIFO's elements
// are cut from all their bytes one after the other. `offset`, sizes and strides are patched at
// every call.
struct Move {
  std::string name = {};  // unique
  int argument = 0;
  int fifo = 0;
  int64_t unit_bytes = 4;  // of offset and walk
  Expression offset = {};
  Walk walk = {};
};
// Go on when the move, and with it what it has written to L3, is done. What a later move reads of
// an earlier one's writes is old without it.
struct Await {
  std::string move = {};
};
using SequenceStep = std::variant<Move, Await>;

struct Program {
  std::string name = {};
  std::vector<std::string> scalars = {};  // what every call is given, beside its arguments
  std::vector<Argument> arguments = {};
  std::vector<Fifo> fifos = {};
  std::vector<Link> links = {};
  std::vector<Core> cores = {};
  std::vector<SequenceStep> sequence = {};
};

}  // namespace fasttps::npu
