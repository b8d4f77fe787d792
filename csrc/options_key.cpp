#include "options_key.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace meshverse {
namespace {

std::string quote(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "'";
}

// A double with the fewest digits that read back as the same value.
std::string shortest(double value) {
  char text[32];
  for (int digits = 15; digits <= 17; ++digits) {
    std::snprintf(text, sizeof text, "%.*g", digits, value);
    if (std::strtod(text, nullptr) == value) break;
  }
  return text;
}

std::string seconds(std::int64_t microseconds) {
  return shortest(static_cast<double>(microseconds) / 1e6) + "s";
}

struct ShowValue {
  std::string operator()(const Absent&) const { return "absent"; }
  std::string operator()(const None&) const { return "None"; }
  std::string operator()(bool value) const { return value ? "True" : "False"; }
  std::string operator()(std::int64_t value) const { return std::to_string(value); }
  std::string operator()(const FloatBits& value) const { return shortest(value.value()); }
  std::string operator()(const std::string& value) const { return quote(value); }
  std::string operator()(const Tagged& value) const {
    return value.text.empty() ? value.kind : value.kind + "(" + value.text + ")";
  }
  std::string operator()(const Handle& value) const { return "<" + value.type_name + " handle>"; }
};

// Adds a value so that no two different values add the same words; `add_handle` adds the words of
// a handle.
template <class AddHandle>
struct AddValue {
  FingerprintBuilder& builder;
  AddHandle add_handle;

  void operator()(const Absent&) const {}
  void operator()(const None&) const {}
  void operator()(bool value) const { builder.add(std::uint64_t{value}); }
  void operator()(std::int64_t value) const { builder.add(value); }
  void operator()(const FloatBits& value) const { builder.add(value.bits); }
  void operator()(const std::string& value) const { builder.add(value); }
  void operator()(const Tagged& value) const { builder.add(value.kind).add(value.text); }
  void operator()(const Handle& value) const { add_handle(builder, value); }
};

template <class AddHandle>
Fingerprint fingerprint(const OptionsKey& key, AddHandle add_handle) {
  FingerprintBuilder builder;
  const auto& [backend, timeout_us, tag, options_type, fields] = key.members();
  builder.add(backend).add(std::uint64_t{timeout_us.has_value()}).add(timeout_us.value_or(0));
  builder.add(tag).add(options_type).add(static_cast<std::uint64_t>(fields.size()));
  for (const auto& [name, value] : fields) {
    builder.add(name).add(static_cast<std::uint64_t>(value.index()));
    std::visit(AddValue<AddHandle>{builder, add_handle}, value);
  }
  return builder.finish();
}

}  // namespace

FloatBits::FloatBits(double value) : bits(0) { std::memcpy(&bits, &value, sizeof bits); }

double FloatBits::value() const {
  double value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

OptionFields differing_fields(const OptionFields& actual, const OptionFields& defaults) {
  OptionFields differing;
  for (const auto& [name, value] : actual) {
    const auto found = defaults.find(name);
    if (found == defaults.end() || !(found->second == value)) differing.emplace(name, value);
  }
  for (const auto& [name, value] : defaults) {
    if (actual.find(name) == actual.end()) differing.emplace(name, Absent());
  }
  return differing;
}

std::uint64_t OptionsKey::hash() const {
  const auto by_identity = [](FingerprintBuilder& builder, const Handle& handle) {
    builder.add(static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(handle.object.get())));
  };
  return fingerprint(*this, by_identity).low;
}

Fingerprint OptionsKey::digest() const {
  const auto by_type = [](FingerprintBuilder& builder, const Handle& handle) {
    builder.add(handle.type_name);
  };
  return fingerprint(*this, by_type);
}

std::string OptionsKey::to_string() const {
  std::string text = "OptionsKey(" + quote(backend);
  if (!options_type.empty()) text += ", " + options_type;
  if (timeout_us) text += ", timeout=" + seconds(*timeout_us);
  for (const auto& [name, value] : fields) text += ", " + name + "=" + meshverse::to_string(value);
  if (!tag.empty()) text += ", tag=" + quote(tag);
  return text + ")";
}

std::string to_string(const OptionValue& value) { return std::visit(ShowValue(), value); }

}  // namespace meshverse
