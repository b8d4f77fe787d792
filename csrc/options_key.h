// Options keys: the settings that a process group was requested with, as a plain value.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <variant>

#include "fingerprint.h"

namespace meshverse {

// Value of a field that the defaults have and the options lack.
struct Absent {
  friend bool operator==(const Absent&, const Absent&) { return true; }
};

struct None {
  friend bool operator==(const None&, const None&) { return true; }
};

// A double by its bits: -0.0 differs from 0.0, and a NaN equals itself.
struct FloatBits {
  explicit FloatBits(double value);
  double value() const;

  std::uint64_t bits;
  friend bool operator==(const FloatBits& a, const FloatBits& b) { return a.bits == b.bits; }
};

// A value as its kind and a string that is unique within the kind: ("bytes", "ab"),
// ("timedelta", "1500000 us"), ("torch.Color", "RED"), ("list", "").
struct Tagged {
  std::string kind;
  std::string text;
  friend bool operator==(const Tagged& a, const Tagged& b) {
    return std::tie(a.kind, a.text) == std::tie(b.kind, b.text);
  }
};

// An opaque Python object: equal only to itself, and kept alive. Copies share one reference.
struct Handle {
  std::shared_ptr<void> object;
  std::string type_name;
  friend bool operator==(const Handle& a, const Handle& b) { return a.object == b.object; }
};

using OptionValue =
    std::variant<Absent, None, bool, std::int64_t, FloatBits, std::string, Tagged, Handle>;

// Values by dotted name: "is_high_priority_stream", "config.min_ctas", "devices[0]", "hints['a']".
using OptionFields = std::map<std::string, OptionValue>;

// The fields of `actual` whose values differ from those in `defaults`, and Absent for fields that
// only `defaults` has. Equal results <=> equal `actual`, for the same `defaults`.
OptionFields differing_fields(const OptionFields& actual, const OptionFields& defaults);

// A backend's name, the options that differ from its defaults, a timeout and an isolation tag.
struct OptionsKey {
  std::string backend;
  std::optional<std::int64_t> timeout_us;  // microseconds
  std::string tag;
  std::string options_type;  // empty if `fields` are relative to known defaults
  OptionFields fields;

  // Members that equality, hash and digest cover. `options_type` is included, because fields that
  // are not relative to defaults have no meaning without their type.
  auto members() const { return std::tie(backend, timeout_us, tag, options_type, fields); }
  friend bool operator==(const OptionsKey& a, const OptionsKey& b) {
    return a.members() == b.members();
  }
  std::uint64_t hash() const;

  // A hash that is the same in every process for equal keys; of a handle, only its type counts.
  Fingerprint digest() const;

  // "OptionsKey('nccl', timeout=600s, config.min_ctas=4, tag='x')".
  std::string to_string() const;
};

// A value as a string for messages: True, 4, 'text', list, <a Device handle>.
std::string to_string(const OptionValue& value);

}  // namespace meshverse
