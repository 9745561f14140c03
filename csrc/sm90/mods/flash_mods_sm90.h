// Forward passes that flash_sm90.cu calls.
#pragma once

#include "flash.h"

namespace sm90 {

void flash_forward_mods(const AttnParams &p);     // changed scores
void flash_forward_dropout(const AttnParams &p);  // dropout alone

}  // namespace sm90
