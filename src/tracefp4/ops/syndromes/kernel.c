/* encode_syndromes in C; reference.py is the definition. Its function is that of every library with codes. */

#include "../syndromes.h"
