// Options keys, compared with an encoding of them that is obviously one-to-one.
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <variant>

#include "input.h"
#include "options_key.h"

namespace meshverse {
namespace {

// Handles of three objects, of two types.
Handle read_handle(Input& input) {
  static const std::shared_ptr<void> objects[] = {
      std::make_shared<int>(0), std::make_shared<int>(1), std::make_shared<int>(2)};
  const std::int64_t which = input.of(0, 2);
  return {objects[which], which == 0 ? "Lock" : "Device"};
}

double read_double(Input& input) {
  if (input.of(0, 1) == 0) return static_cast<double>(input.of(0, 3)) / 2;
  const std::uint64_t bits = input.word();
  double value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

OptionValue read_value(Input& input) {
  switch (input.of(0, 7)) {
    case 0:
      return None();
    case 1:
      return input.of(0, 1) == 1;
    case 2:
      return input.of(-2, 2);
    case 3:
      return static_cast<std::int64_t>(input.word());
    case 4:
      return FloatBits(read_double(input));
    case 5:
      return input.text();
    case 6:
      return Tagged{input.text(), input.text()};
    default:
      return read_handle(input);
  }
}

OptionFields read_fields(Input& input) {
  OptionFields fields;
  for (std::int64_t count = input.of(0, 4); count > 0; --count) {
    fields[input.text()] = read_value(input);
  }
  return fields;
}

OptionsKey read_key(Input& input) {
  OptionsKey key;
  key.backend = input.text();
  if (input.of(0, 1) == 1) key.timeout_us = input.of(0, 3);
  key.tag = input.text();
  key.options_type = input.text();
  key.fields = read_fields(input);
  return key;
}

// Writes a value so that what is written can be read back: lengths first.
class Encoder {
 public:
  explicit Encoder(bool handles_by_type) : handles_by_type_(handles_by_type) {}

  void text(const std::string& text) { out_ += std::to_string(text.size()) + ":" + text; }
  void operator()(const Absent&) {}
  void operator()(const None&) {}
  void operator()(bool value) { out_ += value ? "1" : "0"; }
  void operator()(std::int64_t value) { text(std::to_string(value)); }
  void operator()(const FloatBits& value) { text(std::to_string(value.bits)); }
  void operator()(const std::string& value) { text(value); }
  void operator()(const Tagged& value) {
    text(value.kind);
    text(value.text);
  }
  void operator()(const Handle& value) {
    text(handles_by_type_ ? value.type_name
                          : std::to_string(reinterpret_cast<std::uintptr_t>(value.object.get())));
  }
  void fields(const OptionFields& fields) {
    text(std::to_string(fields.size()));
    for (const auto& [name, value] : fields) {
      text(name);
      text(std::to_string(value.index()));
      std::visit(*this, value);
    }
  }
  const std::string& out() const { return out_; }

 private:
  bool handles_by_type_;
  std::string out_;
};

std::string encode(const OptionFields& fields) {
  Encoder encoder(false);
  encoder.fields(fields);
  return encoder.out();
}

std::string encode(const OptionsKey& key, bool handles_by_type) {
  Encoder encoder(handles_by_type);
  encoder.text(key.backend);
  encoder.text(key.timeout_us ? std::to_string(*key.timeout_us) : "none");
  encoder.text(key.tag);
  encoder.text(key.options_type);
  encoder.fields(key.fields);
  return encoder.out();
}

// Equality and hash are those of the contents, and so is the digest, except for handles.
void check_keys(const OptionsKey& one, const OptionsKey& other) {
  const bool same = encode(one, false) == encode(other, false);
  LAW((one == other) == same);
  LAW((one.hash() == other.hash()) == same);
  const bool same_elsewhere = encode(one, true) == encode(other, true);
  LAW((one.digest() == other.digest()) == same_elsewhere);
  LAW(one == OptionsKey(one) && one.to_string() == OptionsKey(one).to_string());
}

// Equal differences <=> equal fields, and the difference leads back to the fields.
void check_differences(const OptionFields& one, const OptionFields& other,
                       const OptionFields& defaults) {
  const OptionFields differing = differing_fields(one, defaults);
  LAW((encode(differing) == encode(differing_fields(other, defaults))) ==
      (encode(one) == encode(other)));
  LAW(differing_fields(one, one).empty());
  OptionFields restored = defaults;
  for (const auto& [name, value] : differing) {
    if (std::holds_alternative<Absent>(value)) {
      LAW(restored.erase(name) == 1);
    } else {
      restored[name] = value;
    }
  }
  LAW(encode(restored) == encode(one));
}

void check(Input& input) {
  const OptionsKey one = read_key(input);
  const OptionsKey other = input.of(0, 1) == 1 ? read_key(input) : one;
  check_keys(one, other);
  check_differences(one.fields, other.fields, read_fields(input));
}

}  // namespace
}  // namespace meshverse

FUZZ(meshverse::check)
