// The names of our own protocol, rapt.v1: for the server and for those who compute as it would.
#ifndef RAPT_ATTENTION_NATIVE_FIELD_NAMES_H_
#define RAPT_ATTENTION_NATIVE_FIELD_NAMES_H_

#include "attention/field_names.h"

namespace rapt {

// As in an AttendRequest, whose attributes are those of its field `attention`.
inline constexpr FieldNames kNativeNames = {
    .q = "q",
    .k = "k",
    .v = "v",
    .y = "y",
    .mask = "mask",
    .past_key = "past_key",
    .past_value = "past_value",
    .key_lengths = "key_lengths",
    .query_heads = "attention.query_heads",
    .kv_heads = "attention.kv_heads",
    .scale = "attention.scale",
    .softcap = "attention.softcap",
    .left_window = "attention.window.left",
    .right_window = "attention.window.right",
    .dropout_probability = "attention.dropout.probability",
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_NATIVE_FIELD_NAMES_H_
