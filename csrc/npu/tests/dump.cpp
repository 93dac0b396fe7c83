#include "npu/dump.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string_view>

#include "small_program.h"

namespace fasttps::npu {
namespace {

using ::testing::HasSubstr;
using namespace testing;  // NOLINT(google-build-using-namespace)

TEST(Dump, OfTheSmallProgramReadsTopToBottom) {
  EXPECT_EQ(dump(small_program()), R"(program halves(position)

arguments
  x  2048 bytes  in
  y  65536 bytes  out

fifos
  in     512 bytes  (0, 0) -> (0, 1) x 2
  in_0   256 bytes  (0, 1) x 2, walk 8 x 8, 8 x 1 of 4 bytes -> (0, 2) x 2
  in_1   256 bytes  (0, 1) x 2, walk 8 x 1, 8 x 8 of 4 bytes -> (0, 3) x 2
  out_0  256 bytes  (0, 2) x 2 -> (0, 1) x 2
  out_1  256 bytes  (0, 3) x 2 -> (0, 1) x 2
  out    512 bytes  (0, 1) x 2 -> (0, 0)

links
  (0, 1)  in -> in_0 at 0, in_1 at 256
  (0, 1)  out_0 at 0, out_1 at 256 -> out

core (0, 2)
  stack 1024 bytes
  scratch kept, 256 bytes
  for i0 below 4
    if min(i0 + 1, 1)
      acquire e0 of in_0 to read
      acquire e1 of out_0 to write
      copy(e0, kept, 256)
      copy(kept, e1, 256)
      release in_0
      release out_0

core (0, 3)
  stack 1024 bytes
  scratch kept, 256 bytes
  for i0 below 4
    if min(i0 + 1, 1)
      acquire e0 of in_1 to read
      acquire e1 of out_1 to write
      copy(e0, kept, 256)
      copy(kept, e1, 256)
      release in_1
      release out_1

sequence
  move x: x, walk 512 x 1 of 4 bytes -> in
  move y: out -> y from position * 128 on, walk 4 x 128, 128 x 1 of 4 bytes
  await y
)");
}

TEST(Dump, ShowsWhatIsSeldom) {
  Program program = small_program();
  program.fifos[kIn0].consumers.push_back({.tile = {0, 3}, .depth = 3});
  program.fifos.push_back({.name = "near",
                           .element_bytes = 1,
                           .producer = {.tile = {0, 2}},
                           .consumers = {{.tile = {0, 3}}},
                           .shared = true});
  program.links[0].repeat = Expression::scalar(0) + 1;
  program.links.push_back({.tile = {1, 1}, .inputs = {kIn}, .outputs = {kOut}});
  program.cores[0].body = {acquire(kIn0, Port::kConsume, 4, 2),
                           copy(Held{4, Expression::index(0) * 8}, OfScratch{0, 16}, 8),
                           release(kIn0, Port::kConsume, 2)};
  std::get<Move>(program.sequence[0]).walk = {};
  const std::string text = dump(program);
  for (const char* line :
       {"  in_0   256 bytes  (0, 1) x 2, walk 8 x 8, 8 x 1 of 4 bytes -> (0, 2) x 2 and (0, 3) x "
        "3\n",
        "  near   1 byte  (0, 2) x 2 -> (0, 3) x 2, shared\n",
        "  (0, 1)  in -> in_0 at 0, in_1 at 256, each position + 1 times\n",
        "  (1, 1)  in -> out\n", "  acquire e4, e5 of in_0 to read\n",
        "  copy(e4[i0 * 8], kept[16], 8)\n", "  release 2 of in_0\n", "  move x: x, all -> in\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST(Dump, OfUsesShowsWhatThereIs) {
  EXPECT_EQ(dump_uses(small_program(), small_machine()),
            "tile    channels in  channels out          bytes  buffer descriptors    locks\n"
            "(0, 0)       1 of 2        1 of 2         0 of 0             0 of 16  0 of 16\n"
            "(0, 1)       3 of 6        3 of 6  2048 of 65536            16 of 48  8 of 64\n"
            "(0, 2)       1 of 2        1 of 2  2304 of 16384             4 of 16  4 of 16\n"
            "(0, 3)       1 of 2        1 of 2  2304 of 16384             4 of 16  4 of 16\n"
            "ports of mem tiles to cores: 4; paper 002 counts 6 a mem tile, whichever way they "
            "go, of 12\n");
}

// Elements of an XML text, each with its attributes and the text that it begins with.
struct Element {
  std::string name;
  std::map<std::string, std::string> attributes;
  std::string text;
};

// Takes the XML that picture() writes: no comments, no entities of its own, attributes in double
// quotes. Throws std::runtime_error where tags do not match or a character is not escaped.
class XmlReader {
 public:
  explicit XmlReader(const std::string& xml) : rest_(xml) {}

  std::vector<Element> all() {
    while (!rest_.empty()) {
      if (rest_.front() == '<') {
        tag();
      } else {
        const std::string text = until("<");
        check_escaped(text);
        if (!elements_.empty() && elements_.back().text.empty()) elements_.back().text = text;
      }
    }
    if (!open_.empty()) fail("not closed: " + open_.back());
    return elements_;
  }

 private:
  [[noreturn]] static void fail(const std::string& what) {
    throw std::runtime_error("XML: " + what);
  }

  // What comes before one of `ends`, or all.
  std::string until(const char* ends) {
    const size_t length = std::min(rest_.find_first_of(ends), rest_.size());
    std::string text(rest_.substr(0, length));
    rest_.remove_prefix(length);
    return text;
  }

  bool take(std::string_view wanted) {
    if (!rest_.starts_with(wanted)) return false;
    rest_.remove_prefix(wanted.size());
    return true;
  }

  void need(std::string_view wanted) {
    if (!take(wanted))
      fail("wanted " + std::string(wanted) + " before " + std::string(rest_.substr(0, 40)));
  }

  static void check_escaped(std::string_view text) {
    if (text.find_first_of("<>") != std::string_view::npos) fail("a bare < or >");
    for (size_t at = text.find('&'); at != std::string_view::npos; at = text.find('&', at + 1)) {
      const std::string_view after = text.substr(at);
      bool known = false;
      for (const char* entity : {"&amp;", "&lt;", "&gt;", "&quot;"})
        known = known || after.starts_with(entity);
      if (!known) fail("a bare &");
    }
  }

  void tag() {
    need("<");
    if (take("/")) {
      const std::string name = until(">");
      need(">");
      if (open_.empty() || open_.back() != name) fail("closes what is not open: " + name);
      open_.pop_back();
      return;
    }
    Element element{until(" />"), {}, ""};
    while (take(" ")) {
      const std::string key = until("=");
      need("=\"");
      const std::string value = until("\"");
      need("\"");
      check_escaped(value);
      if (!element.attributes.emplace(key, value).second) fail(key + " twice");
    }
    if (!take("/")) open_.push_back(element.name);
    need(">");
    elements_.push_back(std::move(element));
  }

  std::string_view rest_;
  std::vector<Element> elements_;
  std::vector<std::string> open_;
};

std::vector<Element> elements_of(const std::string& xml) { return XmlReader(xml).all(); }

// Elements of a name with an attribute (any, where the key is empty) that hold a text.
int64_t count(const std::vector<Element>& elements, const std::string& name, const std::string& key,
              const std::string& value, const std::string& text = "") {
  return std::count_if(elements.begin(), elements.end(), [&](const Element& one) {
    const auto found = one.attributes.find(key);
    const bool has = key.empty() || (found != one.attributes.end() &&
                                     found->second.find(value) != std::string::npos);
    return one.name == name && has && one.text.find(text) != std::string::npos;
  });
}

TEST(Picture, HasEveryTileAndFifo) {
  Program program = small_program();
  const std::vector<Element> elements = elements_of(picture(program, small_machine()));
  EXPECT_EQ(count(elements, "svg", "xmlns", "http://www.w3.org/2000/svg"), 1);
  EXPECT_EQ(count(elements, "g", "class", "tile"), 2 * 4);
  for (const char* tile : {"core (0, 2)", "core (1, 3)", "mem (1, 1)", "shim (0, 0)"})
    EXPECT_EQ(count(elements, "text", "", "", tile), 1) << tile;
  EXPECT_EQ(count(elements, "g", "class", "fifo"), 6);
  for (const Fifo& fifo : program.fifos) {
    EXPECT_EQ(count(elements, "title", "", "", fifo.name + ": "), 1);
    EXPECT_GE(count(elements, "text", "fill", "#", fifo.name), 1);
  }
  EXPECT_EQ(count(elements, "path", "marker-end", "#head"), 6);
}

TEST(Picture, ABroadcastIsOneArrowThatBranches) {
  Program program = small_program();
  program.fifos[kIn0].consumers.push_back({.tile = {0, 3}});
  const std::vector<Element> elements = elements_of(picture(program, small_machine()));
  EXPECT_EQ(count(elements, "g", "class", "fifo"), 6);
  EXPECT_EQ(count(elements, "path", "marker-end", "#head"), 7);
}

// Row 0 is the lowest, so its y is largest.
TEST(Picture, HasRowZeroAtTheBottom) {
  const std::vector<Element> elements = elements_of(picture(small_program(), small_machine()));
  const auto y_of = [&](const std::string& text) {
    for (const Element& one : elements) {
      if (one.name == "text" && one.text == text) return std::stoi(one.attributes.at("y"));
    }
    return -1;
  };
  EXPECT_GT(y_of("shim (0, 0)"), y_of("mem (0, 1)"));
  EXPECT_GT(y_of("mem (0, 1)"), y_of("core (0, 2)"));
  EXPECT_GT(y_of("core (0, 2)"), y_of("core (0, 3)"));
  EXPECT_GE(y_of("core (0, 3)"), 0);
}

TEST(Picture, ColoursCoresByTheirKernels) {
  Program program = small_program();
  EXPECT_EQ(count(elements_of(picture(program, small_machine())), "rect", "fill", "#cfe3fb"), 3);
  auto& loop = std::get<Loop>(program.cores[1].body[0].what);
  for (Statement& statement : std::get<If>(loop.body[0].what).body) {
    if (auto* call = std::get_if<Call>(&statement.what)) call->kernel = "gemv";
  }
  const std::vector<Element> elements = elements_of(picture(program, small_machine()));
  // A core, and its kernel's square in the legend.
  EXPECT_EQ(count(elements, "rect", "fill", "#cfe3fb"), 2);
  EXPECT_EQ(count(elements, "rect", "fill", "#fde0c5"), 2);
  EXPECT_EQ(count(elements, "text", "font-size", "11", "gemv"), 1);
}

TEST(Picture, EscapesNames) {
  Program program = small_program();
  program.name = "a<b & \"c\">";
  program.fifos[kIn].name = "<in>";
  const std::vector<Element> elements = elements_of(picture(program, small_machine()));
  EXPECT_EQ(count(elements, "title", "", "", "&lt;in&gt;"), 1);
  EXPECT_EQ(count(elements, "text", "", "", "a&lt;b &amp; &quot;c&quot;&gt;"), 1);
}

}  // namespace
}  // namespace fasttps::npu
