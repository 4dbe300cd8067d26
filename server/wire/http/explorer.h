#ifndef RAPT_SERVER_WIRE_HTTP_EXPLORER_H_
#define RAPT_SERVER_WIRE_HTTP_EXPLORER_H_

#include "server/wire/http/router.h"

namespace rapt::http {

// Serves the explorer page of server/web to anybody: the page at "/", its other files below
// "/explorer/". What the page calls needs a token as usual.
void AddExplorer(Router& router);

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_EXPLORER_H_
