#include "machine.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

#include "machine_texts.h"

namespace fasttps::npu {
namespace {

using nlohmann::json;

[[noreturn]] void fail(const std::string& machine, const std::string& what) {
  throw std::invalid_argument("machine " + machine + ": " + what);
}

// A JSON text without repeated keys, which the library takes the last of.
json parse(const std::string& name, std::string_view text) {
  std::vector<std::set<std::string>> keys;
  const auto see = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key &&
        !keys.back().insert(parsed.get<std::string>()).second) {
      fail(name, "key " + parsed.get<std::string>() + " stands twice");
    }
    return true;
  };
  try {
    return json::parse(text, see);
  } catch (const json::exception& error) {
    fail(name, std::string("wanted JSON, got ") + error.what());
  }
}

// Where a number goes, by its path in the file.
struct Field {
  std::string path;
  std::string unit;
  bool may_be_zero;
  std::function<void(double)> set;
};

class Fields {
 public:
  explicit Fields(Machine& machine) {
    Machine& m = machine;
    add("columns", "columns", m.columns);
    add("shim_columns", "columns", m.shim_columns);
    add("core_rows", "rows", m.core_rows);
    add("clock", "MHz", m.clock_mhz);
    add_tile("core", m.core);
    add("core.program", "bytes", m.core.program_bytes);
    add("core.bf16_macs", "per cycle", m.core.bf16_macs_per_cycle);
    add("core.int8_macs", "per cycle", m.core.int8_macs_per_cycle);
    add("core.vector_lanes", "per cycle", m.core.vector_lanes);
    add("core.exponentials", "per cycle", m.core.exp_lanes);
    add("core.exponentials_in_hardware", "0 or 1", m.core.exp_in_hardware, true);
    add("core.call", "cycles", m.core.call_cycles, true);
    add("core.acquire", "cycles", m.core.acquire_cycles, true);
    add_tile("mem_tile", m.mem_tile);
    add_tile("shim", m.shim);
    add("shim.queue_depth", "moves", m.shim.queue_depth);
    add("stream.rate", "bytes per cycle", m.stream_bytes_per_cycle);
    add("stream.latency", "cycles", m.stream_latency_cycles, true);
    add("dram.rate", "GB/s", m.dram_gb_per_s);
    add("dram.rate_per_channel", "GB/s", m.dram_gb_per_s_per_channel);
    add("dram.latency", "ns", m.dram_latency_ns, true);
    add("host.dispatch", "us", m.dispatch_us, true);
    add("host.design_switch", "us", m.design_switch_us, true);
    add("host.sync", "us/MB", m.sync_us_per_mb, true);
    add("host.copy", "GB/s", m.host_copy_gb_per_s);
    add("energy.dram", "pJ/byte", m.energy.dram_pj_per_byte, true);
    add("energy.stream", "pJ/byte", m.energy.stream_pj_per_byte, true);
    add("energy.memory", "pJ/byte", m.energy.memory_pj_per_byte, true);
    add("energy.bf16_mac", "pJ", m.energy.mac_bf16_pj, true);
    add("energy.int8_mac", "pJ", m.energy.mac_int8_pj, true);
    add("energy.static", "mW", m.energy.static_mw, true);
  }

  const std::vector<Field>& all() const { return fields_; }

 private:
  template <class T>
  void add(std::string path, std::string unit, T& to, bool may_be_zero = false) {
    fields_.push_back({std::move(path), std::move(unit), may_be_zero,
                       [&to](double value) { to = static_cast<T>(value); }});
    if constexpr (std::is_integral_v<T>) whole_.insert(fields_.back().path);
  }

  void add_tile(const std::string& tile, TileSpec& spec) {
    // A shim has no memory of its own.
    add(tile + ".memory", "bytes", spec.memory_bytes, true);
    add(tile + ".channels_in", "channels", spec.channels_in);
    add(tile + ".channels_out", "channels", spec.channels_out);
    add(tile + ".buffer_descriptors", "descriptors", spec.buffer_descriptors);
    add(tile + ".locks", "locks", spec.locks);
    add(tile + ".dimensions", "dimensions", spec.dimensions);
  }

 public:
  bool is_whole(const std::string& path) const { return whole_.contains(path); }

 private:
  std::vector<Field> fields_;
  std::set<std::string> whole_;
};

// {"value": 8, "unit": "columns", "source": "..."}
double number(const std::string& machine, const std::string& path, const json& entry,
              const std::string& unit, bool may_be_zero, bool whole) {
  if (!entry.is_object() || entry.size() != 3 || !entry.contains("value") ||
      !entry.contains("unit") || !entry.contains("source")) {
    fail(machine, path + " wanted value, unit and source, got " + entry.dump());
  }
  if (entry["unit"] != unit) {
    fail(machine, path + " wanted the unit " + unit + ", got " + entry["unit"].dump());
  }
  if (!entry["source"].is_string() || entry["source"].get<std::string>().empty()) {
    fail(machine, path + " wanted a source in words, got " + entry["source"].dump());
  }
  const json& value = entry["value"];
  const double found = value.is_number() ? value.get<double>() : -1;
  if (!value.is_number() || !std::isfinite(found) || found < 0 || (found == 0 && !may_be_zero) ||
      (whole && found != std::floor(found)) || found > 1e15) {
    fail(machine, path + " wanted " + (whole ? "a whole" : "a") + " number " +
                      (may_be_zero ? "of 0 or more" : "above 0") + ", got " + value.dump());
  }
  return found;
}

bool is_entry(const json& node) { return node.is_object() && node.contains("value"); }

// Every entry below a node, by its path.
void collect(const json& node, const std::string& path, std::map<std::string, json>& found) {
  for (const auto& [key, child] : node.items()) {
    std::string at = path;
    if (!at.empty()) at += '.';
    at += key;
    if (child.is_object() && !is_entry(child)) {
      collect(child, at, found);
    } else {
      found.emplace(at, child);
    }
  }
}

constexpr const char* kCycles = "kernel_cycles.";
constexpr size_t kMostFitted = 3;

// Sets the machine's numbers to those of a file; what is set is struck from `missing`.
void read(Machine& machine, const json& file, bool is_fit, std::set<std::string>& missing) {
  if (!file.is_object()) fail(machine.name, "wanted an object, got " + file.dump());
  std::map<std::string, json> entries;
  collect(file, "", entries);
  const Fields fields(machine);
  size_t numbers = 0;
  for (const auto& [path, entry] : entries) {
    if (path == "name" || path == "title" || (is_fit && path == "rows")) continue;
    ++numbers;
    if (path.starts_with(kCycles)) {
      machine.kernel_cycles[path.substr(std::string(kCycles).size())] =
          static_cast<int64_t>(number(machine.name, path, entry, "cycles", false, true));
      continue;
    }
    const auto field = std::find_if(fields.all().begin(), fields.all().end(),
                                    [&](const Field& one) { return one.path == path; });
    if (field == fields.all().end()) fail(machine.name, "unknown key " + path);
    field->set(
        number(machine.name, path, entry, field->unit, field->may_be_zero, fields.is_whole(path)));
    missing.erase(path);
  }
  if (!is_fit) return;
  if (numbers > kMostFitted) {
    fail(machine.name, "a fit wanted at most 3 numbers, got " + std::to_string(numbers));
  }
  if (!file.contains("rows") || !file["rows"].is_array() || file["rows"].empty()) {
    fail(machine.name, "a fit wanted the rows of the papers that it is fitted to");
  }
}

std::string text_of(const std::vector<NamedText>& texts, const std::string& name,
                    const char* what) {
  std::string names;
  for (const NamedText& one : texts) {
    if (one.name == name) return std::string(one.json);
    names += (names.empty() ? "" : ", ") + std::string(one.name);
  }
  throw std::invalid_argument(std::string(what) + " wanted " + names + ", got '" + name + "'");
}

}  // namespace

Machine parse_machine(std::string_view text, std::string_view overlay) {
  Machine machine{};
  machine.name = "(unnamed)";
  const json file = parse(machine.name, text);
  for (const char* key : {"name", "title"}) {
    if (!file.is_object() || !file.contains(key) || !file[key].is_string()) {
      fail(machine.name, std::string("wanted a ") + key + " in words");
    }
  }
  machine.name = file["name"];
  machine.title = file["title"];
  std::set<std::string> missing;
  const Fields fields(machine);
  for (const Field& field : fields.all()) missing.insert(field.path);
  read(machine, file, false, missing);
  if (!missing.empty()) fail(machine.name, "lacks " + *missing.begin());
  if (!overlay.empty()) read(machine, parse(machine.name, overlay), true, missing);
  return machine;
}

Machine named_machine(const std::string& name, const std::string& fit) {
  return parse_machine(text_of(machines_texts(), name, "machine"),
                       fit.empty() ? "" : text_of(fits_texts(), fit, "fit"));
}

std::vector<std::string> machine_names() {
  std::vector<std::string> names;
  for (const NamedText& one : machines_texts()) names.emplace_back(one.name);
  return names;
}

}  // namespace fasttps::npu
