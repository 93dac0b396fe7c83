#include "npu/validate.h"

#include <gmock/gmock.h>

#include <functional>
#include <stdexcept>

#include "npu/device.h"
#include "small_program.h"

// Each test breaks one thing of the small program, which is valid.
namespace fasttps::npu {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using namespace testing;  // NOLINT(google-build-using-namespace)

using Change = std::function<void(Program&, Machine&)>;

std::string message(const Change& change) {
  Program program = small_program();
  Machine machine = small_machine();
  change(program, machine);
  try {
    validate(program, machine);
  } catch (const Incompatible& error) {
    EXPECT_THAT(error.what(), StartsWith("halves on small: "));
    return error.what();
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(), Not(StartsWith("halves on small: ")));
    return error.what();
  }
  return "valid";
}

std::string message(const std::function<void(Program&)>& change) {
  return message([&](Program& program, Machine&) { change(program); });
}

#define EXPECT_SAYS(what, ...) EXPECT_THAT(message(__VA_ARGS__), HasSubstr(what))

Fifo shared_fifo(Tile from, Tile to) {
  return {.name = "near",
          .element_bytes = 64,
          .producer = {.tile = from},
          .consumers = {{.tile = to}},
          .shared = true};
}

// The statements of a core's loop, inside its condition.
Body& body_of(Program& program, size_t core = 0) {
  auto& loop = std::get<Loop>(program.cores[core].body[0].what);
  return std::get<If>(loop.body[0].what).body;
}
Loop& loop_of(Program& program) { return std::get<Loop>(program.cores[0].body[0].what); }
Call& call_of(Program& program) { return std::get<Call>(body_of(program)[2].what); }
Move& move_of(Program& program, size_t step) { return std::get<Move>(program.sequence[step]); }

TEST(Validate, TakesTheSmallProgram) {
  EXPECT_EQ(message([](Program&) {}), "valid");
}

TEST(Validate, TellsAWrongProgramFromOneThatTheMachineCannotRun) {
  EXPECT_EQ(message([](Program& p) { p.fifos[kIn0].consumers[0].depth = 0; }),
            "halves: fifo in_0 at (0, 2): wanted a depth of 1 or more, got 0");
  EXPECT_EQ(message([](Program&, Machine& m) { m.core.locks = 3; }),
            "halves on small: (0, 2): wanted at most 3 locks, got 4");
}

TEST(Validate, Tiles) {
  EXPECT_SAYS("halves on small: fifo in at mem tile (2, 1): wanted columns 0 to 1 and rows 0 to 3",
              [](Program& p) { p.fifos[kIn].consumers[0].tile = {2, 1}; });
  EXPECT_SAYS("fifo in_0 at (0, 4)", [](Program& p) { p.fifos[kIn0].consumers[0].tile.row = 4; });
  EXPECT_SAYS("fifo in at mem tile (-1, 1)",
              [](Program& p) { p.fifos[kIn].consumers[0].tile.column = -1; });
  EXPECT_SAYS("halves on small: fifo out at shim (1, 0): wanted a shim with DMAs, columns 0 to 0",
              [](Program& p, Machine& m) {
                m.shim_columns = 1;
                p.fifos[kOut].consumers[0].tile = {1, 0};
              });
  EXPECT_SAYS("core mem tile (0, 1): wanted a row of 2 or more, got 1",
              [](Program& p) { p.cores[0].tile.row = 1; });
  EXPECT_SAYS("core (0, 2): wanted one body a tile, got another",
              [](Program& p) { p.cores[1].tile = p.cores[0].tile; });
  EXPECT_SAYS("fifo in_1: wanted a body for the core at (0, 3), got none",
              [](Program& p) { p.cores.pop_back(); });
}

TEST(Validate, EndsOfFifos) {
  EXPECT_SAYS("fifo in_1: wanted each fifo with a name of its own",
              [](Program& p) { p.fifos[kIn0].name = "in_1"; });
  EXPECT_SAYS("fifo in_0: wanted ends at different tiles, got mem tile (0, 1) twice",
              [](Program& p) { p.fifos[kIn0].consumers[0].tile = {0, 1}; });
  EXPECT_SAYS("fifo in_0: wanted a consumer, got none",
              [](Program& p) { p.fifos[kIn0].consumers.clear(); });
  EXPECT_SAYS("fifo in at shim (0, 0): wanted depth 0 at a shim, got 2",
              [](Program& p) { p.fifos[kIn].producer.depth = 2; });
  EXPECT_SAYS("fifo in: wanted at most one end at a shim, got 2",
              [](Program& p) { p.fifos[kIn].consumers.push_back({.tile = {1, 0}, .depth = 0}); });
  EXPECT_SAYS("fifo in: wanted an element of 1 byte or more, got 0",
              [](Program& p) { p.fifos[kIn].element_bytes = 0; });
  EXPECT_SAYS("fifo in: wanted an element of whole words of 4 bytes for a stream, got 514",
              [](Program& p) { p.fifos[kIn].element_bytes = 514; });
}

TEST(Validate, WalksOfFifos) {
  const auto walk = [](Walk walk, int64_t unit_bytes = 4) {
    return message([&](Program& p) {
      p.fifos[kIn0].producer.walk = walk;
      p.fifos[kIn0].unit_bytes = unit_bytes;
    });
  };
  EXPECT_EQ(walk({{4, 16}, {2, 4}, {2, 8}, {4, 1}}), "valid");
  EXPECT_THAT(
      walk({{2, 32}, {2, 16}, {2, 8}, {2, 4}, {4, 1}}),
      HasSubstr(
          "halves on small: fifo in_0 at mem tile (0, 1): wanted at most 4 dimensions, got 5"));
  EXPECT_THAT(walk({{8, 8}, {4, 1}}), HasSubstr("wanted a walk of 256 bytes, got 128"));
  EXPECT_THAT(walk({{8, 8}, {9, 1}}), HasSubstr("wanted a walk of 256 bytes, got more than 256"));
  EXPECT_THAT(walk({{8, 9}, {8, 1}}),
              HasSubstr("wanted a walk within the 64 units of an element, got unit 64"));
  EXPECT_THAT(walk({{8, 4}, {8, 1}}), HasSubstr("wanted every unit once, got unit 4 twice"));
  EXPECT_THAT(walk({{64, 0}}), HasSubstr("unit 0 twice"));
  EXPECT_THAT(walk({{Expression::scalar(0), 1}}),
              HasSubstr("wanted a constant walk, got position x 1"));
  EXPECT_THAT(walk({{64, -1}}), HasSubstr("wanted strides of 0 or more, got -1"));
  EXPECT_THAT(walk({{0, 1}}), HasSubstr("wanted sizes of 1 or more, got 0"));
  // Words one by one are the innermost dimension themselves.
  EXPECT_EQ(walk({{2, 1}, {2, 2}, {4, 4}, {4, 16}}), "valid");
  // Of bf16: 128 units, in runs of an even count.
  EXPECT_EQ(walk({{16, 8}, {8, 1}}, 2), "valid");
  EXPECT_THAT(walk({{8, 1}, {16, 8}}, 2),
              HasSubstr("wanted runs of whole words of 4 bytes, got 16 units of 2 bytes, 8 apart"));
  EXPECT_THAT(walk({{128, 1}, {1, 1}}, 2), HasSubstr("got 1 units of 2 bytes, 1 apart"));
  EXPECT_THAT(walk({{2, 63}, {64, 1}}, 2),
              HasSubstr("wanted strides of whole words of 4 bytes, got 63 units of 2 bytes"));
  // Units of 16 bytes that do not lie side by side: their words are a dimension.
  EXPECT_EQ(walk({{2, 1}, {2, 8}, {4, 2}}, 16), "valid");
  EXPECT_THAT(walk({{2, 1}, {2, 8}, {2, 4}, {2, 2}}, 16), HasSubstr("at most 4 dimensions, got 5"));
  EXPECT_THAT(message([](Program& p) {
                p.fifos[kIn0].consumers[0].walk = {{2, 32}, {2, 16}, {2, 8}, {8, 1}};
              }),
              HasSubstr("fifo in_0 at (0, 2): wanted at most 3 dimensions, got 4"));
  EXPECT_SAYS("fifo in at shim (0, 0): wanted a shim's walk in its moves",
              [](Program& p) { p.fifos[kIn].producer.walk = {{128, 1}}; });
}

// AM020: a core reaches its own memory, and that to its north, south and west.
TEST(Validate, SharedFifos) {
  const auto between = [](Tile from, Tile to) {
    return message([&](Program& p) {
      p.fifos.push_back(shared_fifo(from, to));
      for (const Tile tile : {from, to}) {
        if (tile.row >= 2 && tile.column == 1) p.cores.push_back({.tile = tile});
      }
    });
  };
  EXPECT_EQ(between({0, 2}, {0, 3}), "valid");
  EXPECT_EQ(between({0, 3}, {0, 2}), "valid");
  EXPECT_EQ(between({0, 2}, {1, 2}), "valid");
  EXPECT_THAT(
      between({1, 2}, {0, 2}),
      HasSubstr("on small: fifo near: wanted a consumer that reaches memory of (1, 2): the core to "
                "the north, south or east of it, got (0, 2)"));
  EXPECT_THAT(between({0, 2}, {1, 3}), HasSubstr("reaches memory of (0, 2)"));
  EXPECT_THAT(between({0, 1}, {0, 2}), HasSubstr("reaches memory of mem tile (0, 1)"));
  const auto changed = [](const std::function<void(Fifo&)>& change) {
    return message([&](Program& p) {
      p.fifos.push_back(shared_fifo({0, 2}, {0, 3}));
      change(p.fifos.back());
    });
  };
  EXPECT_THAT(changed([](Fifo& f) { f.consumers.push_back({.tile = {0, 2}}); }),
              HasSubstr("wanted ends at different tiles"));
  EXPECT_THAT(changed([](Fifo& f) { f.consumers.push_back({.tile = {1, 2}}); }),
              HasSubstr("wanted one consumer of a shared fifo, got 2"));
  EXPECT_THAT(changed([](Fifo& f) { f.producer.walk = {{16, 1}}; }),
              HasSubstr("wanted no walk in a shared fifo"));
  EXPECT_THAT(changed([](Fifo& f) { f.consumers[0].depth = 1; }),
              HasSubstr("wanted one depth of a shared fifo, got 2 and 1"));
  EXPECT_EQ(changed([](Fifo& f) { f.element_bytes = 7; }), "valid");
}

TEST(Validate, Links) {
  EXPECT_SAYS("link at (0, 2): wanted a mem tile, got row 2",
              [](Program& p) { p.links[0].tile = {0, 2}; });
  EXPECT_SAYS("link at mem tile (1, 1): wanted an input that ends here, got in",
              [](Program& p) { p.links[0].tile = {1, 1}; });
  EXPECT_SAYS("wanted an output that begins here, got out_0",
              [](Program& p) { p.links[0].outputs[0] = kOut0; });
  EXPECT_SAYS("link at mem tile (0, 1): wanted a fifo below 6, got 6",
              [](Program& p) { p.links[0].outputs[0] = 6; });
  EXPECT_SAYS("wanted one input to one or more outputs, or more to one, got 2 to 2",
              [](Program& p) { p.links[0].inputs.push_back(kOut0); });
  EXPECT_SAYS("link at mem tile (0, 1): wanted out_1 from byte 256 on, got 128",
              [](Program& p) { p.links[1].offsets_bytes[1] = 128; });
  EXPECT_SAYS("link at mem tile (0, 1): wanted out_1 from byte 256 on, got 260",
              [](Program& p) { p.links[1].offsets_bytes[1] = 260; });
  EXPECT_SAYS("wanted in_1 within the 512 bytes of in, got it up to byte 516",
              [](Program& p) { p.links[0].offsets_bytes[1] = 260; });
  EXPECT_SAYS("wanted in_0 from byte 0 on, got -4",
              [](Program& p) { p.links[0].offsets_bytes[0] = -4; });
  EXPECT_SAYS("link at mem tile (0, 1): wanted 2 offsets, got 1",
              [](Program& p) { p.links[0].offsets_bytes.pop_back(); });
  EXPECT_SAYS("wanted inputs of the 1024 bytes of out, got 512",
              [](Program& p) { p.fifos[kOut].element_bytes *= 2; });
  EXPECT_SAYS("wanted out_1 within the 256 bytes of out, got it up to byte 512",
              [](Program& p) { p.fifos[kOut].element_bytes /= 2; });
  EXPECT_SAYS("wanted one depth, since its fifos share their memory, got 2 and 3",
              [](Program& p) { p.fifos[kIn0].producer.depth = 3; });
  EXPECT_SAYS("wanted to repeat once or more, got 0", [](Program& p) { p.links[0].repeat = 0; });
  EXPECT_SAYS("link at mem tile (0, 1), repeat: wanted a scalar below 1, got 1",
              [](Program& p) { p.links[0].repeat = Expression::scalar(1); });
  EXPECT_SAYS("fifo out_0 at mem tile (0, 1): wanted one link, got 0",
              [](Program& p) { p.links.pop_back(); });
  EXPECT_SAYS("fifo in at mem tile (0, 1): wanted one link, got 2",
              [](Program& p) { p.links.push_back(p.links[0]); });
  EXPECT_EQ(message([](Program& p) { p.links[0].repeat = Expression::scalar(0); }), "valid");
}

TEST(Validate, LimitsOfTiles) {
  EXPECT_SAYS("mem tile (0, 1): wanted at most 2 channels in, got 3",
              [](Program&, Machine& m) { m.mem_tile.channels_in = 2; });
  EXPECT_SAYS("mem tile (0, 1): wanted at most 2 channels out, got 3",
              [](Program&, Machine& m) { m.mem_tile.channels_out = 2; });
  EXPECT_SAYS("shim (0, 0): wanted at most 0 channels in, got 1",
              [](Program&, Machine& m) { m.shim.channels_in = 0; });
  EXPECT_SAYS("mem tile (0, 1): wanted at most 2047 bytes, got 2048",
              [](Program&, Machine& m) { m.mem_tile.memory_bytes = 2047; });
  EXPECT_SAYS("(0, 2): wanted at most 2303 bytes, got 2304",
              [](Program&, Machine& m) { m.core.memory_bytes = 2303; });
  EXPECT_SAYS("mem tile (0, 1): wanted at most 15 buffer descriptors, got 16",
              [](Program&, Machine& m) { m.mem_tile.buffer_descriptors = 15; });
  EXPECT_SAYS("(0, 2): wanted at most 3 locks, got 4",
              [](Program&, Machine& m) { m.core.locks = 3; });
}

TEST(Validate, AcquiresAndReleases) {
  EXPECT_SAYS("core (0, 2) acquires of in_1: wanted a fifo that ends here, got one of other tiles",
              [](Program& p) { body_of(p)[0] = acquire(kIn1, Port::kConsume, 0); });
  EXPECT_SAYS("core (0, 2) acquires of in_0: wanted a fifo that begins here",
              [](Program& p) { body_of(p)[0] = acquire(kIn0, Port::kProduce, 0); });
  EXPECT_SAYS("core (0, 2) acquires: wanted a fifo below 6, got -1",
              [](Program& p) { body_of(p)[0] = acquire(-1, Port::kConsume, 0); });
  EXPECT_SAYS("halves: core (0, 2) acquires of in_0: wanted at most 2 elements held, got 3",
              [](Program& p) { body_of(p)[0] = acquire(kIn0, Port::kConsume, 5, 3); });
  EXPECT_SAYS("wanted 1 element or more, got 0",
              [](Program& p) { body_of(p)[0] = acquire(kIn0, Port::kConsume, 0, 0); });
  EXPECT_SAYS("core (0, 2) acquires of out_0: wanted a number that names no held element, got 0",
              [](Program& p) { body_of(p)[1] = acquire(kOut0, Port::kProduce, 0); });
  EXPECT_SAYS("core (0, 2) releases of in_0: wanted at most 1 elements, as many as are held, got 2",
              [](Program& p) { body_of(p)[4] = release(kIn0, Port::kConsume, 2); });
  EXPECT_SAYS("core (0, 2), if: wanted its body that leaves 0 elements of out_0 held, got 1",
              [](Program& p) { body_of(p).pop_back(); });
  EXPECT_SAYS("core (0, 2), loop i0: wanted a pass that leaves 0 elements of in_0 held, got 1",
              [](Program& p) {
                auto& pass = loop_of(p).body;
                pass.push_back(acquire(kIn0, Port::kConsume, 0));
              });
  EXPECT_SAYS("loop i0: wanted a pass that leaves the same elements of in_0 held, got others",
              [](Program& p) {
                loop_of(p).body = {release(kIn0, Port::kConsume), acquire(kIn0, Port::kConsume, 7)};
                Body& body = p.cores[0].body;
                body.insert(body.begin(), acquire(kIn0, Port::kConsume, 6));
              });
  EXPECT_SAYS("core (0, 2): wanted to release all of in_0 by the end of its body, got 1 held",
              [](Program& p) { p.cores[0].body.push_back(acquire(kIn0, Port::kConsume, 0)); });
}

TEST(Validate, Calls) {
  EXPECT_SAYS("cpoy", [](Program& p) { call_of(p).kernel = "cpoy"; });
  EXPECT_SAYS("calls copy: wanted 3 arguments, got 2",
              [](Program& p) { call_of(p).arguments.pop_back(); });
  EXPECT_SAYS("calls copy, argument 1: wanted memory, got a number",
              [](Program& p) { call_of(p).arguments[1] = Expression(7); });
  EXPECT_SAYS("calls copy, argument 2: wanted a number, got memory",
              [](Program& p) { call_of(p).arguments[2] = Held{0}; });
  EXPECT_SAYS("calls copy, argument 0: wanted an element that is held, got 2",
              [](Program& p) { call_of(p).arguments[0] = Held{2}; });
  EXPECT_SAYS("calls copy, argument 0: wanted an element that is held, got 0",
              [](Program& p) { std::swap(body_of(p)[2], body_of(p)[4]); });
  EXPECT_SAYS("argument 1: wanted a scratch below 1, got 1",
              [](Program& p) { call_of(p).arguments[1] = OfScratch{1}; });
  EXPECT_SAYS("argument 2: wanted the index of a loop around it, got i1",
              [](Program& p) { call_of(p).arguments[2] = Expression::index(1); });
  EXPECT_SAYS("argument 0: wanted the index of a loop around it, got i1",
              [](Program& p) { call_of(p).arguments[0] = Held{0, Expression::index(1)}; });
  EXPECT_SAYS("argument 2: wanted a scalar below 1, got 1",
              [](Program& p) { call_of(p).arguments[2] = Expression::scalar(1); });
}

TEST(Validate, BytesOfCalls) {
  EXPECT_SAYS("core (0, 2) calls copy, argument 0: wanted at most 256 bytes of its memory, got 260",
              [](Program& p) { call_of(p).arguments[2] = Expression(260); });
  EXPECT_SAYS("argument 1: wanted at most 256 bytes of its memory, got 257",
              [](Program& p) { call_of(p).arguments[1] = OfScratch{0, 1}; });
  EXPECT_SAYS("argument 0: wanted an offset of 0 or more, got -4",
              [](Program& p) { call_of(p).arguments[0] = Held{0, -4}; });
  // The loop's last pass has index 3.
  const auto with_index = [](int64_t step) {
    return message([&](Program& p) {
      call_of(p).arguments[0] = Held{0, Expression::index(0) * step};
      call_of(p).arguments[2] = Expression(64);
    });
  };
  EXPECT_EQ(with_index(64), "valid");
  EXPECT_THAT(message([](Program& p) {
                call_of(p).arguments[0] = Held{0, 256 - Expression::index(0) * 64};
                call_of(p).arguments[2] = Expression(64);
              }),
              HasSubstr("wanted at most 256 bytes of its memory, got 320"));
  EXPECT_THAT(with_index(65), HasSubstr("wanted at most 256 bytes of its memory, got 259"));
  // A condition that does not hold there, and a size that only the call knows.
  EXPECT_EQ(message([](Program& p) {
              call_of(p).arguments[0] = Held{0, Expression::index(0) * 200};
              call_of(p).arguments[2] = Expression(200 - 144);
              std::get<If>(loop_of(p).body[0].what).condition = 1 - min(Expression::index(0), 1);
            }),
            "valid");
  EXPECT_EQ(message([](Program& p) { call_of(p).arguments[2] = Expression::scalar(0); }), "valid");
}

TEST(Validate, LoopsAndConditions) {
  EXPECT_SAYS("core (0, 2), loop i0: wanted an index of its own, got 0", [](Program& p) {
    Loop inner = loop_of(p);
    inner.body.clear();
    loop_of(p).body.emplace_back().what = inner;
  });
  EXPECT_SAYS("core (0, 2), loop i0: wanted a count of 0 or more, got -1",
              [](Program& p) { loop_of(p).count = -1; });
  EXPECT_SAYS("core (0, 2), loop i0, count: wanted the index of a loop around it, got i0",
              [](Program& p) { loop_of(p).count = Expression::index(0); });
  EXPECT_SAYS("core (0, 2), if: wanted the index of a loop around it, got i0", [](Program& p) {
    p.cores[0].body.emplace_back().what = If{Expression::index(0), {}};
  });
  EXPECT_SAYS("core (0, 2), scratch kept: wanted 1 byte or more, got 0",
              [](Program& p) { p.cores[0].scratch[0].bytes = 0; });
  EXPECT_EQ(message([](Program& p) { loop_of(p).count = Expression::scalar(0) + 1; }), "valid");
}

TEST(Validate, Moves) {
  EXPECT_SAYS("move x: wanted each move with a name of its own",
              [](Program& p) { move_of(p, 1).name = "x"; });
  EXPECT_SAYS("move x: wanted an argument below 2, got 2",
              [](Program& p) { move_of(p, 0).argument = 2; });
  EXPECT_SAYS("move x: wanted a fifo below 6, got 9", [](Program& p) { move_of(p, 0).fifo = 9; });
  EXPECT_SAYS("move x: wanted a fifo that begins or ends at a shim, got in_0",
              [](Program& p) { move_of(p, 0).fifo = kIn0; });
  EXPECT_SAYS("move x: wanted an argument that is read, got y, which is only written",
              [](Program& p) { move_of(p, 0).argument = 1; });
  EXPECT_SAYS("move y: wanted an argument that is written, got x, which is only read",
              [](Program& p) { move_of(p, 1).argument = 0; });
  EXPECT_EQ(message([](Program& p) { p.arguments[0].access = Access::kInOut; }), "valid");
  EXPECT_SAYS("move y: wanted at most 4 dimensions, got 5", [](Program& p) {
    move_of(p, 1).walk = {{1, 0}, {1, 0}, {1, 0}, {4, 128}, {128, 1}};
  });
  EXPECT_SAYS("halves: moves of fifo in: wanted whole elements of 512 bytes, got 508",
              [](Program& p) { move_of(p, 0).walk = {{127, 1}}; });
  EXPECT_SAYS("move x: wanted bytes 0 to 2048 of x, got 4 to 2052",
              [](Program& p) { move_of(p, 0).offset = 1; });
  EXPECT_SAYS("move y, offset: wanted a scalar below 1, got 1",
              [](Program& p) { move_of(p, 1).offset = Expression::scalar(1); });
  EXPECT_SAYS("move y, sizes: wanted the index of a loop around it, got i0",
              [](Program& p) { move_of(p, 1).walk[0].size = Expression::index(0); });
  EXPECT_SAYS("await z: wanted a move before it, got none",
              [](Program& p) { std::get<Await>(p.sequence[2]).move = "z"; });
  EXPECT_SAYS("await y: wanted a move before it, got none",
              [](Program& p) { std::swap(p.sequence[1], p.sequence[2]); });
  // All of an argument; a count and an offset that only the call knows.
  EXPECT_EQ(message([](Program& p) { move_of(p, 0).walk = {}; }), "valid");
  EXPECT_EQ(message([](Program& p) { move_of(p, 1).walk[0].size = Expression::scalar(0); }),
            "valid");
  // An element in two moves.
  EXPECT_EQ(message([](Program& p) {
              move_of(p, 0).walk = {{127, 1}};
              Move rest = move_of(p, 0);
              rest.name = "rest";
              rest.walk = {{1, 1}};
              p.sequence.emplace_back(rest);
            }),
            "valid");
}

TEST(Validate, Arguments) {
  EXPECT_SAYS("argument x: wanted each name once", [](Program& p) { p.arguments[1].name = "x"; });
  EXPECT_SAYS("argument y: wanted 1 byte or more, got 0",
              [](Program& p) { p.arguments[1].bytes = 0; });
}

// By hand, of each tile: channels in and out, ports to cores, bytes, buffer descriptors, locks.
TEST(TileUses, AreCounted) {
  struct Row {
    Tile tile;
    int64_t in, out, ports, bytes, descriptors, locks;
  };
  // The mem tile has two pools of 2 x 512 bytes, with locks for two halves each. A core has 2 x 256
  // bytes of each FIFO, 256 of scratch and 1024 of stack.
  const std::vector<Row> wanted{{{0, 0}, 1, 1, 0, 0, 0, 0},
                                {{0, 1}, 3, 3, 4, 2048, 16, 8},
                                {{0, 2}, 1, 1, 0, 2304, 4, 4},
                                {{0, 3}, 1, 1, 0, 2304, 4, 4}};
  const std::vector<TileUse> uses = tile_uses(small_program());
  ASSERT_EQ(uses.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_EQ(uses[i].tile, wanted[i].tile);
    EXPECT_EQ(uses[i].channels_in, wanted[i].in);
    EXPECT_EQ(uses[i].channels_out, wanted[i].out);
    EXPECT_EQ(uses[i].core_ports, wanted[i].ports);
    EXPECT_EQ(uses[i].bytes, wanted[i].bytes);
    EXPECT_EQ(uses[i].buffer_descriptors, wanted[i].descriptors);
    EXPECT_EQ(uses[i].locks, wanted[i].locks);
  }
}

// One channel out for all consumers, one in at each.
TEST(TileUses, ABroadcastLeavesThroughOneChannel) {
  Program program = small_program();
  program.fifos[kIn0].consumers.push_back({.tile = {0, 3}});
  const std::vector<TileUse> uses = tile_uses(program);
  EXPECT_EQ(uses[1].channels_out, 3);
  EXPECT_EQ(uses[1].core_ports, 4);
  EXPECT_EQ(uses[3].channels_in, 2);
  EXPECT_EQ(uses[3].bytes, 2304 + 512);
}

// No channel and no descriptor, and memory and locks at the producer alone.
TEST(TileUses, ASharedFifoLiesInItsProducer) {
  Program program = small_program();
  program.fifos.push_back(shared_fifo({0, 2}, {0, 3}));
  const std::vector<TileUse> uses = tile_uses(program);
  EXPECT_EQ(uses[2].bytes, 2304 + 2 * 64);
  EXPECT_EQ(uses[2].locks, 6);
  EXPECT_EQ(uses[2].channels_out, 1);
  EXPECT_EQ(uses[2].buffer_descriptors, 4);
  EXPECT_EQ(uses[3].bytes, 2304);
  EXPECT_EQ(uses[3].locks, 4);
}

// Paper 002, IV-B: ten pipelines with a port each for Q and O and two for P, and K and V once for
// all of them: 42 of the 48 of eight mem tiles.
TEST(TileUses, PortsAreThoseOfPaper002) {
  Program program;
  const auto add = [&](Tile from, const std::vector<Tile>& to) {
    program.fifos.push_back({.name = std::to_string(program.fifos.size()),
                             .element_bytes = 4,
                             .producer = {.tile = from}});
    for (const Tile tile : to) program.fifos.back().consumers.push_back({.tile = tile});
  };
  std::vector<Tile> first, third;
  for (int pipeline = 0; pipeline < 10; ++pipeline) {
    const int column = pipeline % 8, row = pipeline < 8 ? 2 : 5;
    first.push_back({column, row});
    third.push_back({column, 4});
    add({pipeline / 5, 1}, {first.back()});      // Q
    add({column, 3}, {{column, 1}});             // P, in rows
    add({column, 1}, {third.back()});            // P, in tiles of the multiplier
    add(third.back(), {{6 + pipeline / 5, 1}});  // O
    add({column, 0}, {{column, 1}});             // of a shim: not counted
  }
  add({2, 1}, first);  // K
  add({3, 1}, third);  // V
  int64_t ports = 0;
  for (const TileUse& use : tile_uses(program)) ports += use.tile.row == 1 ? use.core_ports : 0;
  EXPECT_EQ(ports, 42);
}

}  // namespace
}  // namespace fasttps::npu
