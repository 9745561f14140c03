// The forward passes that flash_sm90.cu hands on.
#pragma once

#include "flash.h"

namespace sm90 {

void flash_forward_mods(const AttnParams &p);     // flash_mods_sm90.cu: changed scores
void flash_forward_dropout(const AttnParams &p);  // flash_dropout_sm90.cu: dropout without them

}  // namespace sm90
