#include "npu/machine.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <stdexcept>

#include "npu/machine_texts.h"

namespace fasttps::npu {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

json toy() {
  for (const NamedText& one : machines_texts()) {
    if (one.name == "toy") return json::parse(one.json);
  }
  throw std::logic_error("no toy");
}

std::string error_of(const std::string& text, const std::string& overlay = "") {
  try {
    parse_machine(text, overlay);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "(accepted)";
}

TEST(Machine, ThoseOfThePapersAreThere) {
  EXPECT_THAT(machine_names(), IsSupersetOf({"xdna1", "xdna2", "toy"}));
  const Machine strix = named_machine("xdna2");
  EXPECT_EQ(strix.columns * strix.core_rows, 32);
  EXPECT_EQ(strix.core.memory_bytes, 64 << 10);
  EXPECT_EQ(strix.mem_tile.memory_bytes, 512 << 10);
  // Six in and six out of each of eight mem tiles; STEEL counts 48 of one direction.
  EXPECT_EQ(strix.mem_tile.channels_in * strix.columns, 48);
  // Phoenix has five columns, one of them without a shim's DMA.
  EXPECT_EQ(named_machine("xdna1").columns, 5);
  EXPECT_EQ(named_machine("xdna1").shim_columns, 4);
  EXPECT_TRUE(strix.core.exp_in_hardware);
  EXPECT_FALSE(named_machine("xdna1").core.exp_in_hardware);
  // The measured block of 64 x 64 x 64: 3.938 us at 1.8 GHz.
  EXPECT_NEAR(static_cast<double>(strix.kernel_cycles.at("steel_scores")) / strix.clock_mhz, 3.938,
              5e-4);
}

TEST(Machine, UnknownNamesAreAnsweredWithThoseThatThereAre) {
  try {
    named_machine("xdna9");
    FAIL() << "accepted";
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("xdna1"), HasSubstr("xdna2"), HasSubstr("'xdna9'")));
  }
}

TEST(Machine, EveryNumberIsNeeded) {
  const json whole = toy();
  EXPECT_EQ(error_of(whole.dump()), "(accepted)");
  const std::vector<json::json_pointer> paths{json::json_pointer("/columns"),
                                              json::json_pointer("/core/locks"),
                                              json::json_pointer("/dram/rate")};
  for (const auto& path : paths) {
    json without = whole;
    without[path.parent_pointer()].erase(path.back());
    EXPECT_THAT(error_of(without.dump()), HasSubstr("lacks")) << path.to_string();
    EXPECT_THAT(error_of(without.dump()), HasSubstr(path.back()));
  }
}

TEST(Machine, WrongNumbersAreRefusedByTheirPath) {
  const auto with = [](const char* path, const json& value) {
    json changed = toy();
    changed[json::json_pointer(path)] = value;
    return error_of(changed.dump());
  };
  EXPECT_THAT(with("/dram/rate/unit", "GiB/s"), HasSubstr("dram.rate wanted the unit GB/s"));
  EXPECT_THAT(with("/dram/rate/value", 0), HasSubstr("dram.rate wanted a number above 0, got 0"));
  EXPECT_THAT(with("/dram/rate/value", -1), HasSubstr("above 0"));
  EXPECT_THAT(with("/dram/rate/value", "8"), HasSubstr("above 0"));
  EXPECT_THAT(with("/core/locks/value", 1.5), HasSubstr("core.locks wanted a whole number"));
  EXPECT_THAT(with("/core/locks/source", ""), HasSubstr("core.locks wanted a source in words"));
  EXPECT_THAT(with("/core/locks", 16), HasSubstr("core.locks wanted value, unit and source"));
  EXPECT_THAT(with("/core/wings", {{"value", 2}, {"unit", "wings"}, {"source", "x"}}),
              HasSubstr("unknown key core.wings"));
}

TEST(Machine, BrokenTextIsAnErrorInALine) {
  EXPECT_THAT(error_of("{"), HasSubstr("wanted JSON"));
  EXPECT_THAT(error_of("[]"), HasSubstr("wanted a name"));
  EXPECT_THAT(error_of(R"({"name": "a", "name": "b"})"), HasSubstr("name stands twice"));
}

TEST(Machine, AFitReplacesAtMostThreeNumbersAndSaysForWhichRows) {
  const auto number = [](double value, const char* unit) {
    return json{{"value", value}, {"unit", unit}, {"source", "fitted"}};
  };
  json fit{{"dram", {{"rate", number(74, "GB/s")}}}, {"rows", {"Table 3"}}};
  EXPECT_EQ(parse_machine(toy().dump(), fit.dump()).dram_gb_per_s, 74);
  json without_rows = fit;
  without_rows.erase("rows");
  EXPECT_THAT(error_of(toy().dump(), without_rows.dump()), HasSubstr("rows of the papers"));
  fit["host"] = {{"copy", number(1, "GB/s")},
                 {"dispatch", number(1, "us")},
                 {"design_switch", number(1, "us")}};
  EXPECT_THAT(error_of(toy().dump(), fit.dump()), HasSubstr("at most 3 numbers, got 4"));
}

}  // namespace
}  // namespace fasttps::npu
