#include <algorithm>
#include <array>
#include <map>

#include "dump.h"
#include "validate.h"

namespace fasttps::npu {
namespace {

constexpr int kTileHeight = 84, kRowGap = 64, kColumnGap = 76, kMargin = 20;
constexpr int kLane = 5;  // between lines that run side by side
constexpr int kWidth = 1200;

constexpr std::array kLineColours{"#1f5fa8", "#b3471b", "#2e7d32", "#7b3fa0",
                                  "#00796b", "#a61e4d", "#6d5a00", "#455a64"};
constexpr std::array kKernelColours{"#cfe3fb", "#fde0c5", "#d5efd3", "#ead7f5",
                                    "#fff2b8", "#fbd3dc", "#cdeeea", "#e4e0d0"};

struct Point {
  int x;
  int y;
};

std::string escaped(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    switch (c) {
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '&':
        safe += "&amp;";
        break;
      case '"':
        safe += "&quot;";
        break;
      default:
        safe += c;
    }
  }
  return safe;
}

void add_kernels(const Body& body, std::vector<std::string>& names) {
  for (const Statement& statement : body) {
    if (const auto* call = std::get_if<Call>(&statement.what)) {
      if (std::find(names.begin(), names.end(), call->kernel) == names.end())
        names.push_back(call->kernel);
    } else if (const auto* loop = std::get_if<Loop>(&statement.what)) {
      add_kernels(loop->body, names);
    } else if (const auto* condition = std::get_if<If>(&statement.what)) {
      add_kernels(condition->body, names);
    }
  }
}

// A place that several lines want: each gets the next lane of it.
class Lanes {
 public:
  int next(int place) { return used_[place]++; }

 private:
  std::map<int, int> used_;
};

class Picture {
 public:
  Picture(const Program& program, const Machine& machine)
      : program_(program),
        machine_(machine),
        rows_(2 + machine.core_rows),
        tile_width_(std::clamp((kWidth - 2 * kMargin) / std::max(machine.columns, 1) - kColumnGap,
                               72, 160)) {
    for (const Core& core : program.cores) {
      std::vector<std::string> names;
      add_kernels(core.body, names);
      std::string joined;
      for (const std::string& name : names) joined += (joined.empty() ? "" : ", ") + name;
      kernels_[core.tile] = joined.empty() ? "no kernel" : joined;
      if (std::find(legend_.begin(), legend_.end(), kernels_[core.tile]) == legend_.end())
        legend_.push_back(kernels_[core.tile]);
    }
    for (const TileUse& use : tile_uses(program)) uses_[use.tile] = use;
    for (const Fifo& fifo : program.fifos) count_ends(fifo);
  }

  std::string svg() {
    const int width = 2 * kMargin + machine_.columns * pitch();
    const int grid = kMargin + 20 + rows_ * (kTileHeight + kRowGap);
    const int height = grid + 18 * static_cast<int>(legend_.size()) + kMargin;
    out_ = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + std::to_string(width) +
           " " + std::to_string(height) + "\" width=\"" + std::to_string(width) + "\" height=\"" +
           std::to_string(height) + "\" font-family=\"sans-serif\" font-size=\"9\">\n";
    out_ += "<defs>";
    for (size_t i = 0; i < kLineColours.size(); ++i) {
      out_ += "<marker id=\"head" + std::to_string(i) +
              "\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"6\" markerHeight=\"6\" "
              "orient=\"auto\"><path d=\"M0 0L8 4L0 8z\" fill=\"" +
              kLineColours[i] + "\"/></marker>";
    }
    out_ += "</defs>\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
    out_ +=
        text_at({kMargin, kMargin + 4}, program_.name + " on " + machine_.name, "font-size=\"14\"");
    for (int row = 0; row < rows_; ++row)
      for (int column = 0; column < machine_.columns; ++column) add_tile({column, row});
    for (size_t f = 0; f < program_.fifos.size(); ++f) add_fifo(f);
    out_ += names_;
    for (size_t i = 0; i < legend_.size(); ++i) {
      const int y = grid + 18 * static_cast<int>(i);
      out_ += "<rect x=\"" + std::to_string(kMargin) + "\" y=\"" + std::to_string(y) +
              "\" width=\"14\" height=\"12\" stroke=\"#888\" fill=\"" + colour(legend_[i]) +
              "\"/>\n";
      out_ += text_at({kMargin + 20, y + 10}, legend_[i], "font-size=\"11\"");
    }
    return out_ + "</svg>\n";
  }

 private:
  enum Side { kTop, kBottom, kLeft, kRight };

  int pitch() const { return tile_width_ + kColumnGap; }
  Point corner(Tile tile) const {
    return {kMargin + kColumnGap + tile.column * pitch(),
            kMargin + 20 + (rows_ - 1 - tile.row) * (kTileHeight + kRowGap)};
  }

  std::string colour(const std::string& kernels) const {
    const auto at = std::find(legend_.begin(), legend_.end(), kernels) - legend_.begin();
    return kKernelColours[static_cast<size_t>(at) % kKernelColours.size()];
  }

  static std::string text_at(Point at, const std::string& text, const std::string& more = "") {
    return "<text x=\"" + std::to_string(at.x) + "\" y=\"" + std::to_string(at.y) + "\"" +
           (more.empty() ? "" : " " + more) + ">" + escaped(text) + "</text>\n";
  }

  void add_tile(Tile tile) {
    const Point at = corner(tile);
    const auto use = uses_.find(tile);
    const bool used = use != uses_.end();
    const char* kind = tile.row == 0 ? "shim" : tile.row == 1 ? "mem" : "core";
    std::string fill = "white";
    if (used) fill = kernels_.contains(tile) ? colour(kernels_[tile]) : "#e8e8e8";
    out_ += "<g class=\"tile\"><rect x=\"" + std::to_string(at.x) + "\" y=\"" +
            std::to_string(at.y) + "\" width=\"" + std::to_string(tile_width_) + "\" height=\"" +
            std::to_string(kTileHeight) + "\" rx=\"4\" stroke=\"" + (used ? "#444" : "#bbb") +
            "\" fill=\"" + fill + "\"/>\n";
    const int x = at.x + 6;
    out_ += text_at({x, at.y + 16},
                    std::string(kind) + " (" + std::to_string(tile.column) + ", " +
                        std::to_string(tile.row) + ")",
                    used ? "font-weight=\"bold\"" : "fill=\"#999\"");
    if (used) {
      int y = at.y + 30;
      if (kernels_.contains(tile)) {
        const size_t room = static_cast<size_t>(tile_width_ - 10) / 5;
        const std::string& names = kernels_[tile];
        out_ += text_at({x, y}, names.size() > room ? names.substr(0, room - 2) + ".." : names);
        y += 13;
      }
      out_ += text_at({x, y}, std::to_string(use->second.channels_in) + " in, " +
                                  std::to_string(use->second.channels_out) + " out");
      if (tile.row > 0) out_ += text_at({x, y + 13}, std::to_string(use->second.bytes) + " bytes");
    }
    out_ += "</g>\n";
  }

  // A line straight up or down, or to the east, where nothing lies between.
  static bool is_straight(const Fifo& fifo) {
    if (fifo.consumers.size() != 1) return false;
    const Tile from = fifo.producer.tile, to = fifo.consumers[0].tile;
    return (from.column == to.column && std::abs(from.row - to.row) == 1) ||
           (from.row == to.row && to.column - from.column == 1);
  }

  // Where a FIFO leaves its producer, and enters a consumer.
  static std::pair<Side, Side> sides(const Fifo& fifo, Tile to) {
    const Tile from = fifo.producer.tile;
    const bool up = to.row > from.row;
    if (!is_straight(fifo)) return {leaves_up(fifo) ? kTop : kBottom, kLeft};
    if (from.row == to.row) return {kRight, kLeft};
    return up ? std::pair{kTop, kBottom} : std::pair{kBottom, kTop};
  }

  static bool leaves_up(const Fifo& fifo) {
    return std::any_of(fifo.consumers.begin(), fifo.consumers.end(),
                       [&](const End& end) { return end.tile.row >= fifo.producer.tile.row; });
  }

  // What leaves a tile's top and what its neighbour's bottom share the same places.
  using Edge = std::pair<Tile, Side>;
  static Edge edge(Tile tile, Side side) {
    if (side == kBottom) return {{tile.column, tile.row - 1}, kTop};
    return {tile, side};
  }

  void count_ends(const Fifo& fifo) {
    if (fifo.consumers.empty()) return;
    ++ends_[edge(fifo.producer.tile, sides(fifo, fifo.consumers[0].tile).first)];
    for (const End& end : fifo.consumers) {
      const Side side = sides(fifo, end.tile).second;
      if (side == kLeft) ++ends_[edge(end.tile, side)];
    }
  }

  // The next free place on a side of a tile; all of a side's are equally far from each other.
  Point place(Tile tile, Side side) {
    const int count = ends_[edge(tile, side)] + 1, number = ++placed_[edge(tile, side)];
    const Point at = corner(tile);
    switch (side) {
      case kTop:
        return {at.x + tile_width_ * number / count, at.y};
      case kBottom:
        return {at.x + tile_width_ * number / count, at.y + kTileHeight};
      case kLeft:
        return {at.x, at.y + kTileHeight * number / count};
      default:
        return {at.x + tile_width_, at.y + kTileHeight * number / count};
    }
  }

  void add_fifo(size_t f) {
    const Fifo& fifo = program_.fifos[f];
    if (fifo.consumers.empty()) return;
    colour_ = f % kLineColours.size();
    out_ += "<g class=\"fifo\" fill=\"none\" stroke=\"" + std::string(kLineColours[colour_]) +
            "\"" + (fifo.shared ? " stroke-dasharray=\"4 2\"" : "") + ">\n<title>" +
            escaped(fifo.name) + ": " + std::to_string(fifo.element_bytes) + " bytes</title>\n";
    const auto [out_side, in_side] = sides(fifo, fifo.consumers[0].tile);
    const Point from = place(fifo.producer.tile, out_side);
    if (is_straight(fifo)) {
      const Tile consumer = fifo.consumers[0].tile;
      const bool vertical = in_side != kLeft;
      const int near = corner(consumer).y + (in_side == kBottom ? kTileHeight : 0);
      const Point to = vertical ? Point{from.x, near} : place(consumer, kLeft);
      const Point middle{(from.x + to.x) / 2, (from.y + to.y) / 2};
      line({from, to}, true);
      name(fifo.name, {middle.x, middle.y - (vertical ? 0 : 4)}, vertical, "middle");
    } else {
      branch(fifo, from, out_side == kTop);
    }
    out_ += "</g>\n";
  }

  // From the producer to a lane between two rows, along it, and from it down or up between columns
  // to the left side of each consumer.
  void branch(const Fifo& fifo, Point from, bool up) {
    const int gap = fifo.producer.tile.row + (up ? 1 : 0);
    const int offset = 8 + lanes_of_rows_.next(gap) * kLane % (kRowGap - 16);
    const int lane = from.y + (up ? -offset : offset);
    line({from, {from.x, lane}}, false);
    for (const End& end : fifo.consumers) {
      const Point to = place(end.tile, kLeft);
      const int x = to.x - 14 - lanes_of_columns_.next(end.tile.column) * kLane % (kColumnGap - 22);
      line({{from.x, lane}, {x, lane}, {x, to.y}, to}, true);
      name(fifo.name, {to.x - 12, to.y - 4}, false, "end");
    }
  }

  void line(const std::vector<Point>& points, bool head) {
    out_ += "<path d=\"";
    for (size_t i = 0; i < points.size(); ++i) {
      out_ +=
          (i == 0 ? "M" : "L") + std::to_string(points[i].x) + " " + std::to_string(points[i].y);
    }
    out_ +=
        "\"" + (head ? " marker-end=\"url(#head" + std::to_string(colour_) + ")\"" : "") + "/>\n";
  }

  void name(const std::string& name, Point at, bool vertical, const std::string& anchor) {
    std::string more = "text-anchor=\"" + anchor + "\"";
    if (vertical) {
      more += " transform=\"rotate(-90 " + std::to_string(at.x) + " " + std::to_string(at.y) +
              ") translate(0 -4)\"";
    }
    // Over whatever lines are there, once all are.
    names_ += text_at(at, name, more + " stroke=\"white\" stroke-width=\"3\" aria-hidden=\"true\"");
    names_ += text_at(at, name, more + " stroke=\"none\" fill=\"" + kLineColours[colour_] + "\"");
  }

  const Program& program_;
  const Machine& machine_;
  int rows_;
  int tile_width_;
  std::map<Tile, std::string> kernels_;
  std::vector<std::string> legend_;
  std::map<Tile, TileUse> uses_;
  std::map<Edge, int> ends_;
  std::map<Edge, int> placed_;
  Lanes lanes_of_rows_;
  Lanes lanes_of_columns_;
  size_t colour_ = 0;
  std::string out_;
  std::string names_;
};

}  // namespace

std::string picture(const Program& program, const Machine& machine) {
  return Picture(program, machine).svg();
}

}  // namespace fasttps::npu
